"""``cause.json`` in a run's folder: the result of examining the recorded calls."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import Field, computed_field, model_validator

from assay.harness.errors import ExitCode
from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.pack import PackEntry, hash_pack, read_manifest
from assay.harness.evidence.run_file import RunFile
from assay.harness.schema import Record
from assay.harness.text import two_digits
from assay.harness.verdict import KernelOnCalls, KernelResult, Verdict, cause_of, exit_code_of, kernel_verdict


class LayerBound(Record):
    """The largest own error (relative L1) that noise explained in the replayed calls of a layer and phase, and the largest that was
    found, as a multiple of its own bound."""

    layer: int
    phase: str
    bound: float
    worst: float = 0.0


class ReplayResult(KernelResult, KernelOnCalls, RunRecord):
    """A candidate's result on recorded calls.

    Attributes:
        run: nonce of the run whose calls were examined; empty if they belong to none.
        pack: hash of the pack whose calls were examined, as `assay.harness.evidence.pack.hash_pack` computes it.
        examined: hashes of the files of the examined calls.
        noise: quantisation that it declares, for example "int8_qk"; empty if its dtype's rounding is its only noise.
        recorded: calls in the pack, in the phases that the candidate computes.
        with_prefix: examined calls with a cached prefix of at least `assay.harness.conditions.CACHED_PREFIX_TOKENS` tokens.
        envelope: by phase that the candidate claims, which layers, new tokens and cached prefixes the pack's calls have, in words;
            empty where it has none of the phase. Only `replay` of a pack fills it in: a run has an envelope of its own.
        worst: largest own error over calls, cells and heads, as a multiple of its bound.
        bounds: by layer and phase.
        not_tested: sentences.
        not_run: why the kernel was not run on these calls, as when it ended its process; empty otherwise. A pass needs that.
        first_finding_s: seconds until the first findings; None if there are none.
    """

    pack: str = ""
    examined: tuple[str, ...] = ()
    noise: str
    recorded: int
    with_prefix: int
    envelope: dict[str, str] = Field(default_factory=dict)
    worst: float
    bounds: tuple[LayerBound, ...]
    not_tested: tuple[str, ...] = ()
    not_run: str = ""
    first_finding_s: float | None = None

    # In the document as in those of other commands: a sweep, and scripts, compare it with the exit code.
    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """ "regression" if a finding is more severe than "info", else "inconclusive" if something is missing, else "pass"."""
        return kernel_verdict(self.findings, self.missing)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command: it follows from the verdict."""
        return exit_code_of(self.verdict)

    @model_validator(mode="before")
    @classmethod
    def _without_verdict(cls, data: Any) -> Any:
        """Drop the verdict and the exit code of a document that was read: they are computed."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in ("verdict", "exit_code")}

    def summary(self) -> str:
        """Summarise in a sentence what the candidate does wrong if known, how many calls were examined, and the worst own error."""
        cause = cause_of(self.findings)
        does = (
            f"{self.kernel} {cause.does}" if cause and cause.does else f"{self.kernel}, {len(self.findings)} findings"
        )
        worst = (
            f"worst own error {two_digits(self.worst)} times its bound"
            if isfinite(self.worst)
            else "an output is not finite"
        )
        return f"{does}; {self.calls} of {self.recorded} recorded calls; {worst}"

    @property
    def missing(self) -> tuple[str, ...]:
        """Requirements of a pass that were not tested."""
        uncovered = [] if self.with_prefix else ["no call had a cached prefix: record a pack with the prefix cache on"]
        lacking = [
            f"the pack has no {phase} call, which the kernel claims"
            for phase, text in self.envelope.items()
            if not text
        ]
        return (*uncovered, *lacking, *filter(None, [self.not_run]))


CAUSE = RunFile("cause.json", ReplayResult)


def foreign_cause(result: ReplayResult, candidate: str, phases: Collection[str], pack: Path | None) -> str:
    """Explain why a result does not belong to a candidate's recorded calls; empty if it does.

    Args:
        result: what was read.
        candidate: name of the run's candidate.
        phases: phases that it claims.
        pack: the run's replay pack; None if it recorded none.

    Raises:
        EvidenceError: the pack's manifest is damaged.
    """
    if result.kernel != candidate:
        return f"it examined {result.kernel}, not {candidate}"
    if pack is None:
        return "the run has no recorded calls"
    if result.pack != hash_pack(pack):
        return "it examined the calls of another pack"
    entries = read_manifest(pack).calls
    examined = set(result.examined)
    due = {_stratum(entry) for entry in entries if entry.spec.phase in phases}
    if lacking := due - {_stratum(entry) for entry in entries if entry.sha256 in examined}:
        layer, phase, _ = min(lacking)
        return f"it left out recorded calls, for example those of layer {layer}, {phase}"
    return ""


def _stratum(entry: PackEntry) -> tuple[int, str, str]:
    """Return an entry's stratum: layer, phase, and whether it is a worst call. At least one call of each is examined."""
    return entry.spec.layer, entry.spec.phase, entry.chosen
