"""The requests of a run: the questions, prompts and requests of both sides."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from assay.evals.loads import DEFAULT as DEFAULT_SHAPES
from assay.evals.questions import BUILTIN_DATA
from assay.harness.policy import SuiteName, split_words
from assay.harness.sides import Settings


class Workload(Settings):
    """The questions and prompts of both sides."""

    suites: tuple[SuiteName, ...] = Field(
        ("accuracy", "greedy", "logits", "layers"),
        min_length=1,
        description="suites to run, separated by commas: accuracy, greedy, logits, layers, latency",
    )
    data: str = Field(
        BUILTIN_DATA,
        min_length=1,
        description="questions: builtin; a CSV file with simple-evals columns, or a hub dataset; gsm8k, or gsm8k:FILE",
    )
    questions: int = Field(
        4096, ge=1, description="most multiple-choice questions asked; fewer if the answers decide sooner"
    )
    order_seed: int = Field(0, ge=0, description="seed of the random order of the questions")
    greedy_prompts: int = Field(
        128, description="number of prompts in the greedy comparison; fewer than 128 cannot pass"
    )
    logits_prompts: int = Field(
        64, description="number of prompts whose logits are compared; fewer than 64 give no verdict"
    )
    concurrency: int = Field(32, ge=1, le=1024, description="requests in flight")
    max_tokens: int | None = Field(
        None, ge=1, description="token limit of an answer; by default 32 for the built-in questions, else 2048"
    )
    latency_shapes: tuple[str, ...] = Field(
        DEFAULT_SHAPES,
        min_length=1,
        description="shapes of requests to time: short, long, shared, chunked, mixed, offline, or tokens as PROMPT:OUTPUT[:SHARED]",
    )
    latency_concurrency: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        (1, 4),
        min_length=1,
        description="requests in flight while timing, separated by commas; each is a separate load",
    )
    latency_seconds: float = Field(
        120.0, gt=0, description="seconds of timing, warm-up included; more if the 6 rounds after warm-up take longer"
    )
    budget_mb: int = Field(256, ge=1, description="largest size of the recorded replay pack, in MiB")

    _split = field_validator("suites", "latency_shapes", "latency_concurrency", mode="before")(
        lambda value: split_words(value)
    )

    @field_validator("greedy_prompts", "logits_prompts")
    @classmethod
    def _asks_something(cls, prompts: int, info: ValidationInfo) -> int:
        if prompts < 1:
            suite = str(info.field_name).removesuffix("_prompts")
            raise ValueError(f"at least 1; to leave the suite out, name the others with --suites, without {suite}")
        return prompts

    @property
    def synthetic(self) -> bool:
        """True if the questions are the built-in synthetic ones."""
        return self.data == BUILTIN_DATA

    @property
    def token_limit(self) -> int:
        """Token limit of a multiple-choice answer; simple-evals and SGLang use 2048 for real MMLU."""
        return self.max_tokens or (32 if self.synthetic else 2048)
