"""``invariance.json``: the result of ``assay invariance``, and everything a reader needs to believe it."""

from __future__ import annotations

from pydantic import Field

from assay.harness.judge.judgement import Judgement
from assay.harness.judge.traces import PartingRow
from assay.harness.schema import RULE, Part
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, Finding, Verdict


class ArmRow(Part):
    """One arm: the features that were on together, and the distance of its output from the base's."""

    number: int
    features: tuple[str, ...]
    chosen_by: str = Field(
        description='"base", "base again", "base longer", "base third", "pairs", "together", "reduction" or "sensitivity"'
    )
    verdict: Verdict
    why: tuple[Statement, ...] = Field(description="reasons other than distances; none for a pass")
    server: int
    startup_s: float = Field(description="0 if the server was running already")
    seconds: float
    prefill_kl: float | None = Field(
        None, description="mean divergence from the base, in nats, over scored prompt tokens"
    )
    prefill_worst: float | None = None
    decode_kl: float | None = Field(None, description="the same over generated tokens, as long as answers are the same")
    decode_worst: float | None = None
    seen: dict[str, str] = Field(default_factory=dict, description="proof that each feature was on")


class InvarianceResult(Judgement):
    __doc__ = f"A complete comparison of features. {RULE}"

    created: str = Field(description="ISO 8601, UTC")
    command: str
    backend: str
    model: str
    device: str
    dtype: str
    hardware: str
    git: str
    packages: dict[str, str]
    seconds: float = Field(description="seconds of all variants, including servers")
    servers: int
    probes: int
    floor_kl: float = Field(
        description="mean divergence of the base from itself in other batches, in nats; the larger measure"
    )
    bound_kl: float = Field(description="mean divergence that counts as noise, in nats; the larger measure")
    arms: tuple[ArmRow, ...]
    features: dict[str, str] = Field(description="features that variants toggle: id -> effect")
    not_covered: dict[str, str] = Field({}, description="features that cannot be toggled here: id -> reason")
    partings: tuple[PartingRow, ...] = Field((), description="one for each finding, in their order")
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]

    @property
    def unmet(self) -> list[Check]:
        """The requirements of a pass that are not met."""
        return [check for check in self.checks if check.status == "missing"]

    @property
    def decided(self) -> Statement:
        """State the decision that follows from all findings and checks."""
        if self.findings:
            return state("features-change-output", first=self.findings[0].claim, further=len(self.findings) - 1)
        if self.unmet:
            return state("requirement-unmet", requirement=self.unmet[0].requirement, outcome=self.unmet[0].outcome)
        return state(
            "features-change-nothing", backend=self.backend, features=len(self.features),
            arms=sum(bool(arm.features) for arm in self.arms),
        )  # fmt: skip
