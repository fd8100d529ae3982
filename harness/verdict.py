"""The words of a verdict: what a check, a finding and a verdict are."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.evidence.records import Record

Verdict = Literal["pass", "regression", "inconclusive", "error"]
CheckStatus = Literal["ok", "failed", "missing", "not checked"]
Severity = Literal["info", "warning", "serious"]


class Part(Record):
    """Base of every part of a report: plain JSON, in which a number that is none is null."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Check(Part):
    """One condition of a pass, and whether it was met. `missing` and `failed` forbid a pass; `not checked` is not asked yet."""

    name: str
    status: CheckStatus
    found: str
    settles: str = Field("", description="what would settle it, where it is not ok")


class Finding(Part):
    """One thing that is wrong: where, why, on what evidence, and a command that shows it again."""

    kind: str
    severity: Severity
    where: str
    diagnosis: str
    evidence: tuple[str, ...]
    reproduce: str
