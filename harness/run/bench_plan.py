"""A bench, checked, and the order in which its blocks are played."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from assay.evals.loads import CHUNK, Shape, check_fit, shapes_of
from assay.harness.config import BENCH_FLAGS, RunSpec
from assay.harness.engines.model import model_shape
from assay.harness.engines.sglang.launch import CHUNK_FLAG
from assay.harness.run.plan import Plan
from assay.harness.run.servers import check_together
from assay.harness.sides import Role

_LENGTH_PROMPTS = 16
"""Prompts whose answer lengths are compared, where they are not forced."""
_MIN_REQUESTS = 2
"""A block has as many requests as are in flight, but at least this many. Blocks are short, to keep drift within a pair small."""
_TURNS: tuple[tuple[Role, bool], ...] = (
    ("reference", False),
    ("candidate", False),
    ("reference", True),
    ("candidate", True),
)
"""The blocks of a load in a round: role, and whether it is the role's second block. Their order is random in each round."""


@dataclass(frozen=True)
class BenchPlan:
    """A checked bench.

    Attributes:
        run: backends, model, engine flags, bound and budget, and the prompts whose answer lengths are compared.
        shapes: lengths of the requests.
        vocabulary: size of the model's vocabulary.
        seed: seed of the prompts and of the order of blocks.
    """

    run: Plan
    shapes: tuple[Shape, ...]
    vocabulary: int
    seed: int

    @property
    def loads(self) -> list[tuple[Shape, int]]:
        """Every shape at every concurrency."""
        return [
            (shape, concurrency) for shape in self.shapes for concurrency in self.run.spec.workload.latency_concurrency
        ]

    @property
    def eager(self) -> bool:
        """True if both servers run without CUDA graphs: calls of a kernel of the contract in decode cannot be captured."""
        return self.run.has_decode_kernel

    @property
    def command(self) -> str:
        """The command that repeats it."""
        flags = self.run.spec.given_flags(BENCH_FLAGS)
        return shlex.join(["assay", "bench", *flags])

    @property
    def arguments(self) -> tuple[str, ...]:
        """The chunk length, for a chunked shape; the flags of a side override it."""
        chunked = any(shape.chunked for shape in self.shapes)
        return (f"{CHUNK_FLAG}={CHUNK[self.run.spec.device]}",) if chunked else ()


def timed_spec(spec: RunSpec) -> RunSpec:
    """Make the spec of what is timed: the same servers without shadow and tracer, and prompts whose answer lengths compare."""
    return spec.changed(suites=("greedy",), questions=1, greedy_prompts=_LENGTH_PROMPTS)


def plan_bench(run: Plan, seed: int = 0) -> BenchPlan:
    """Check a bench; start nothing.

    Args:
        run: a checked run of `timed_spec`.
        seed: seed of the prompts and of the order of blocks.

    Raises:
        UsageError: an unknown shape, a shape too long for the model, or servers that cannot run at the same time.
    """
    spec = run.spec
    shapes = shapes_of(spec.workload.latency_shapes, spec.device)
    model = model_shape(run.model)
    check_fit(shapes, model.context)
    check_together(run, "their blocks alternate, so that drift cancels")
    return BenchPlan(run, shapes, model.vocabulary, seed)


@dataclass(frozen=True)
class Turn:
    """One block.

    Attributes:
        round: number of the round.
        role: the server under load.
        again: whether it is the role's second block of the round.
        shape: lengths.
        concurrency: largest number of requests in flight.
        seed: seed of the prompts; the same for the four blocks of a load in a round.
    """

    round: int
    role: Role
    again: bool
    shape: Shape
    concurrency: int
    seed: str

    @property
    def requests(self) -> int:
        """Number of requests."""
        return max(_MIN_REQUESTS, self.concurrency)


def turns(plan: BenchPlan) -> Iterator[list[Turn]]:
    """Yield groups of four blocks to be played one after the other, endlessly: each round has every load once, at random."""
    rng = random.Random(plan.seed)
    number = 0
    while True:
        loads = plan.loads
        rng.shuffle(loads)
        for shape, concurrency in loads:
            seed = f"{plan.seed}/{number}/{shape.name}/{concurrency}"
            order = list(_TURNS)
            rng.shuffle(order)
            yield [Turn(number, role, again, shape, concurrency, seed) for role, again in order]
        number += 1
