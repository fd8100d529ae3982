"""The parts that every judgement is made of: numbers with their bounds, verdicts of suites, and the base of a result."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from assay.harness.policy import SuiteName
from assay.harness.schema import RULE
from assay.harness.statement import Statement, Worded
from assay.harness.verdict import Decided, Verdict

WHOLE: tuple[SuiteName, ...] = ("accuracy", "greedy", "logits", "layers")
"""Suites without which a run is partial. The latency suite is requested separately: it does not measure accuracy."""
LENGTH_RATIO = "answer-length-ratio"
"""Id of the number that compares the lengths of both roles' answers."""
SCHEMA: Literal["assay.report/3"] = "assay.report/3"


class Metric(Statement):
    """A measured number with its interval and the bound that applies."""

    words: ClassVar[tuple[str, ...]] = ("title", "text", "explain")

    id: str = Field(description='stable: the quantity and its part, such as "mean-kl-cold"')
    quantity: str = Field(description='such as "mean-kl"')
    part: str = Field(
        "", description='the part that was measured, such as "cold", or empty for a quantity without parts'
    )
    value: float | None
    low: float | None = None
    high: float | None = None
    bound: float | None = Field(None, description="the most that the entire interval may reach")
    policy: str = Field(
        "",
        description='the line of policy that sets the bound, such as "margin = 0.05 (default)", if one does',
    )


def measure(
    quantity: str, value: float | None, *, part: str = "", low: float | None = None, high: float | None = None,
    bound: float | None = None, policy: str = "", **values: Any,
) -> Metric:  # fmt: skip
    """Make a metric. The function of `assay.reports.wording` that has the quantity as name says it, with these `values`."""
    return Metric(
        id=f"{quantity}-{part}" if part else quantity, quantity=quantity, part=part, value=value, low=low, high=high, bound=bound,
        policy=policy, values=values,
    )  # fmt: skip


class SuiteVerdict(Worded):
    """The verdict of a suite, or of a load of a bench, with its reason."""

    words = ("title",)

    id: str = Field(description='stable, such as "accuracy"')
    asked: str = Field(
        "", description="the data set of questions, or the load, or empty for a suite that needs neither"
    )
    verdict: Verdict
    why: tuple[Statement, ...] = Field(description="the deciding number, the bound that applies, and other reasons")
    p_regression: float | None = Field(
        None, description="p value of no regression: small if the suite shows one, or null if it tests nothing"
    )


class Judgement(Decided, Worded):
    __doc__ = f"""Base of the results of a run and of a comparison of features. {RULE}"""

    words = ("headline", "reasons")

    schema_id: Literal["assay.report/3"] = Field(SCHEMA, alias="schema")
