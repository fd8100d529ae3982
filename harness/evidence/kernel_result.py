"""A kernel's result on calls without a server: from a check, a replay, or a run's ``matrix.json`` and ``cause.json``."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, computed_field, field_validator, model_validator

from assay.harness.errors import ExitCode, UsageError
from assay.harness.evidence.pack import PackEntry, hash_pack, read_manifest
from assay.harness.evidence.run_file import RunFile, RunRecord
from assay.harness.schema import RULE, Part, page_in_notebook
from assay.harness.text import counted, percent, times
from assay.harness.verdict import Finding, Verdict, cause_of, exit_code_of, kernel_verdict

if TYPE_CHECKING:
    from pandas import DataFrame

Value = float | str


class Property(Part):
    """A property of one feature of a sequence, a query or a call."""

    feature: str = Field(description="the feature's name in `assay.harness.localize.experiment`")
    kind: Literal[
        ">=",
        "<=",
        "==",
        "!=",
        "between",
        "in",
        "residue",
        "no residue",
        "residue between",
        "power of two",
        "no power of two",
    ]
    values: tuple[Value, ...] = Field(
        (), description="a limit, both ends of a range, a list, or modulus and remainders"
    )
    right: tuple[float, ...] = Field(
        (), description="the nearest values that are right, where no call has a value between these and a limit"
    )


class Axis(Part):
    """One axis of the smallest failing call, varied with all others held, and compared with every call that was run."""

    name: str
    wrong: tuple[Value, ...] = Field(description="values with which a sequence is wrong")
    right: tuple[Value, ...] = Field(description="values with which the smallest call is right, and no call is wrong")


class Tried(Part):
    """The condition under which sequences are wrong, tested on calls that were drawn for it.

    On every call that was run, a sequence within the context is wrong if it has all properties, and right if it lacks one.
    """

    fault: str = Field(
        "output",
        description='the kind of error: "output", "lse-wrong", "input-written", "outside" of the tensors, or the breach of the '
        "contract, as a predicate of the kernel",
    )
    rule: tuple[Property, ...]
    context: dict[str, Value] = Field({}, description="values of features to which the condition is limited")
    wrong: int = Field(
        description="sequences with all properties on calls that were drawn after the rule was found: all were wrong"
    )
    right: int = Field(description="other sequences on such calls: all were right")
    calls: int = Field(description="calls used by the experiments")
    outside: int = Field(
        0, description="wrong sequences outside the context, on all calls: the condition says nothing about them"
    )
    always: bool = Field(
        True,
        description="whether all sequences with all properties are wrong; otherwise only such are, and the counts are of all calls",
    )
    part: tuple[Property, ...] = Field(
        (), description="which queries, heads and dims of such a sequence are wrong, by default all"
    )
    rivals: tuple[tuple[Property, ...], ...] = Field(
        (), description="rules on other features that no call distinguishes from it"
    )


class CaseWhy(Part):
    """A case that was not computed or broke the contract, with the reason."""

    case: str
    why: str


class MeasuredCall(Part):
    """A computed call, with the error of its worst head: relative L1, by position."""

    case: str
    condition: dict[str, str] = Field(description="by axis, the call's value")
    error: float | None = Field(description="null if it is not finite")
    bound: float = Field(description="the largest error that rounding, or the declared quantisation, explains")
    wrong: bool

    _finite = field_validator("error")(lambda value: value if value is None or math.isfinite(value) else None)


class Met(Part):
    """The fewest and the most tokens, keys and sequences in calls with some value.

    Each band between them has a call: 0 and 1, 2 to 16, 17 to 64, 65 to 256 and so on; for sequences 1 to 8, 9 to 64 and so on.
    Numbers beyond a band without a call do not count.
    """

    new: tuple[int, int] = Field(description="new tokens of a sequence")
    keys: tuple[int, int] = Field(description="keys of a sequence, cached or new")
    sequences: tuple[int, int] = Field(description="sequences of a call")


class Pairs(Met):
    """The range that all tested pairs of values of two axes have in common."""

    met: int = Field(description="pairs that some call had")
    of: int = Field(description="pairs of the values that the axes had")


def common(mets: Sequence[Met]) -> dict[str, tuple[int, int]]:
    """Return the range of each count that all share. If they share none, its first number is larger than its last."""
    return {
        count: (max(getattr(met, count)[0] for met in mets), min(getattr(met, count)[1] for met in mets))
        for count in Met.model_fields
    }


class Reach(Part):
    """The lengths and numbers of sequences in calls: each by itself, ascending, and together with values of the axes."""

    new: tuple[int, ...] = Field(description="new tokens of a sequence")
    behind: tuple[int, ...] = Field(description="new tokens of a sequence with a cached prefix")
    keys: tuple[int, ...] = Field(description="keys of a sequence, cached or new")
    sequences: tuple[int, ...] = Field(description="sequences of a call")
    met: dict[str, dict[str, Met]] = Field({}, description="by axis and value, the calls with that value")
    pairs: dict[str, Pairs] = Field({}, description="by two axes, such as `dtype, data`, those with a value of each")


class Gap(Part):
    """Calls that were not computed."""

    what: str = Field(description="the values of axes that distinguish them, if any")
    why: str = Field(
        "", description="the message of the kernel or its environment, or empty if its declaration excludes it"
    )
    calls: int = Field(0, description="0 if the matrix has none")
    example: str = ""


class Coverage(Part):
    """A check's coverage: the values of its calls, each by itself, their reach, and the gaps."""

    values: dict[str, tuple[str, ...]] = Field({}, description="by axis, the values that computed calls had")
    reach: dict[str, Reach] = Field({}, description="by phase, the reach of the calls")
    lses: int = Field(0, description="calls whose log-sum-exps were compared")
    gaps: tuple[Gap, ...] = ()
    runs: int = Field(0, description="number of times that the kernel ran")
    device: str = ""


class KernelResult(Part, RunRecord):
    __doc__ = f"""A kernel's result on the calls of the op-level matrix, or on recorded calls. {RULE}"""

    schema_id: Literal["assay.kernel/1"] = Field("assay.kernel/1", alias="schema")
    model_config = ConfigDict(ser_json_inf_nan="null")

    kernel: str
    calls: int = Field(0, description="calls that it computed or broke")
    worst_own: float | None = Field(
        None,
        description="relative L1 of the cell and head that is worst relative to its bound, or null if it is not finite, or, like "
        "`worst_bound`, if no call was computed",
    )
    worst_bound: float | None = None
    findings: tuple[Finding, ...] = Field((), description="bugs and other errors, named if a hypothesis fits")
    missing: tuple[str, ...] = Field((), description="requirements of a pass that were not tested")
    not_run: str = Field("", description="why the kernel was not run, as when it ended its process, else empty")
    smallest: str = Field(
        "",
        description="the smallest failing call, and whether it fails in a fresh process, or an empty string if all pass",
    )
    test: str = Field("", description="source of a pytest file that failed in a fresh process, if any")
    again: str = Field("", description="a command that repeats this, or empty if commands cannot name the kernel")
    seconds: float = 0.0
    traceback: str = Field("", description="of the first exception that the kernel raised")
    # On the matrix.
    shapes: str = Field("", description="in a run, the shape that all calls share")
    quick: str = Field("", description="for a quick check, the dtype and head_dim of its calls; empty otherwise")
    failing: tuple[str, ...] = Field((), description="names of the cases that are out of bounds or broken")
    tried: Tried | None = Field(
        None, description="the condition under which it is wrong, or null if none survived fresh calls"
    )
    axes: tuple[Axis, ...] = Field((), description="axes of the smallest failing call with values on which it is right")
    by_numbers: bool = Field(
        False,
        description="whether the same call is wrong with some numbers and right with others, so that no axis describes the error",
    )
    broken: tuple[CaseWhy, ...] = ()
    refused: tuple[CaseWhy, ...] = ()
    excluded: tuple[CaseWhy, ...] = Field((), description="cases that its declaration excludes")
    left_out: int = Field(0, description="cases not run because the kernel was clearly wrong before")
    coverage: Coverage = Coverage()
    measured: tuple[MeasuredCall, ...] = Field(
        (), description="the calls that it computed, with error and bound of each"
    )
    # On recorded calls.
    pack: str = Field("", description="hash of the pack, as `assay.harness.evidence.pack.hash_pack` computes it")
    examined: tuple[str, ...] = Field((), description="hashes of the files of the examined calls")
    recorded: int = Field(0, description="calls in the pack, in the phases that the candidate computes")
    with_prefix: int = Field(0, description="examined calls with a cached prefix")
    envelope: dict[str, str] = Field(
        {},
        description="by phase that the kernel claims, ranges of the pack's calls, or empty without calls of the phase",
    )
    outside: tuple[tuple[int, str], ...] = Field(
        (), description="layers and phases with an examined call that is out of bounds"
    )
    not_tested: tuple[str, ...] = ()

    @field_validator("worst_own")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is None or math.isfinite(value) else None

    @model_validator(mode="before")
    @classmethod
    def _without_verdict(cls, data: Any) -> Any:
        """Drop computed fields from a document that was read."""
        computed = ("verdict", "exit_code")
        return {key: value for key, value in data.items() if key not in computed} if isinstance(data, dict) else data

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """ "regression" if a finding is more severe than "info", else "inconclusive" if anything is missing, else "pass"."""
        return kernel_verdict(self.findings, [*self.missing, *filter(None, [self.not_run])])

    @computed_field(description="0 pass, 1 regression, 3 no verdict")  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> ExitCode:
        """The command's exit code, which follows from the verdict."""
        return exit_code_of(self.verdict)

    @property
    def computed(self) -> int:
        """Number of calls that it computed."""
        return self.calls - len(self.broken)

    @property
    def worst(self) -> float:
        """Return the largest error as a multiple of its bound, or 0 if no call was computed."""
        if self.worst_bound is None:
            return 0.0
        return math.inf if self.worst_own is None else self.worst_own / self.worst_bound

    def __repr__(self) -> str:
        return f"<KernelResult {self.verdict}: {self.summary()}>"

    def __str__(self) -> str:
        return repr(self)

    _repr_html_ = page_in_notebook

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame of the measured calls: a row for each, with its condition, error and bound.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError:
            raise UsageError(
                "to_frame() needs pandas, which is not installed.", "pandas", "pip install pandas"
            ) from None
        rows = [call.model_dump() for call in self.measured]
        return DataFrame([{"case": row.pop("case"), **row.pop("condition"), **row} for row in rows])

    def summary(self) -> str:
        """Summarise in a sentence: the kernel's fault if known, the number of wrong calls, and the worst own error."""
        cause = cause_of(self.findings)
        return "; ".join(filter(None, [self.extent(cause.does if cause else ""), self.error]))

    def extent(self, does: str = "") -> str:
        """State on how many calls the kernel is right or wrong.

        Args:
            does: its fault as a predicate, or empty to leave it out.
        """
        if self.recorded:
            verdict = f"{self.kernel} {does}" if does else f"{self.kernel}, {counted(len(self.findings), 'finding')}"
            verdict += f"; {self.calls} of {counted(self.recorded, 'recorded call')}"
        elif self.exit_code == ExitCode.NO_VERDICT:
            verdict = f"No verdict on {self.kernel}: requirements of a pass were not tested"
        elif self.exit_code == ExitCode.PASS:
            verdict = f"{self.kernel} is correct on all {counted(self.calls, 'call')}"
            verdict += f" of a quick check: {self.quick} only" if self.quick else ""
        elif self.failing:
            of = f"the first {self.calls} of " * bool(self.left_out) + counted(self.calls + self.left_out, "call")
            wrong = f"wrong on {len(self.failing)} of {of}"
            verdict = f"{self.kernel} {does}; {wrong}" if does else f"{self.kernel} is {wrong}"
        else:
            wrong = f"{self.kernel} {does or 'has serious findings'}"
            verdict = f"{wrong}; its outputs are within bounds on all {counted(self.calls, 'call')}"
        return verdict

    @property
    def error(self) -> str:
        """The worst own error as text, or empty if no call was computed."""
        if self.worst_bound is None:
            return ""
        if self.worst_own is None:
            return "an output is not finite"
        explained = percent(self.worst_bound)
        return f"worst error {percent(self.worst_own)}, {times(self.worst)} what rounding explains ({explained})"


MATRIX = RunFile("matrix.json", KernelResult)
CAUSE = RunFile("cause.json", KernelResult)


def foreign_cause(result: KernelResult, candidate: str, phases: Collection[str], pack: Path | None) -> str:
    """Explain why a result does not belong to a candidate's recorded calls, or return an empty string.

    Args:
        phases: the phases that it claims.
        pack: the run's replay pack, or None if it recorded none.

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
