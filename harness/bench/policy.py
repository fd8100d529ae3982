"""What decides a latency verdict, and how much is measured for it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from assay.harness.config import RunSpec


class BenchPolicy(BaseModel):
    """The fields of a `RunSpec` that concern timing.

    Attributes:
        shapes: the loads, by name or as lengths.
        concurrency: requests in flight; each value is a separate load.
        bound: largest ratio of times, candidate over reference, that passes.
        seconds: seconds of measuring, warm-up included; more if the rounds that a verdict needs take longer.
        alpha: error rate of each interval, and of a false regression.
        seed: seed of the prompts and of the order of blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    shapes: tuple[str, ...]
    concurrency: tuple[int, ...]
    bound: float
    seconds: float
    alpha: float
    seed: int = 0


def make_policy(spec: RunSpec, seed: int = 0) -> BenchPolicy:
    """The policy of a spec."""
    return BenchPolicy(
        shapes=spec.latency_shapes,
        concurrency=spec.latency_concurrency,
        bound=spec.latency_bound,
        seconds=spec.latency_seconds,
        alpha=spec.alpha,
        seed=seed,
    )
