"""A claim about a run, checked against its evidence.

A claim is ``METRIC OP NUMBER`` (``MMLU >= 0.60``, ``accuracy ~ 60 %``, ``MMLU ~0.60+``), ``all tests passed`` or ``TEST passed``.
Any other text is reported as undecidable.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ConfigDict, Field, computed_field

from assay.harness.errors import ExitCode, UsageError
from assay.harness.ingest.quantity import UNIT, Unit, spelled, unit_of
from assay.harness.ingest.recognise import statements_of
from assay.harness.ingest.result import Statement
from assay.harness.schema import RULE, Part
from assay.harness.text import listed, one_line

Outcome = Literal["confirmed", "refuted", "undecided"]
SCHEMA: Literal["assay.claims/1"] = "assay.claims/1"
_MAX_CITES = 8
_ALL = re.compile(r"(?:all|every) (?:the )?(?:\d+ )?tests? (?:have |has |are )?pass(?:ed|es|ing)?", re.IGNORECASE)
_TEST = re.compile(r"(?P<name>\S+) (?:has |is )?(?P<outcome>passed|passes|failed|fails)", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?P<name>[A-Za-z][^<>=≥≤≈~]{0,200}?)\s{0,9}(?P<op>>=|<=|≥|≤|==|=|>|<|≈|~|\bis\b|\bof\b|:)\s{0,9}(?P<about>[~≈])?\s{0,9}"
    r"(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s{0,9}(?P<percent>%)?"
    rf"(?P<plus>\+)?(?:\s{{0,9}}(?P<unit>{UNIT}))?(?P<more>\+)?",
    re.IGNORECASE,
)
_OPERATORS = {"≥": ">=", "≤": "<=", "≈": "~", "==": "=", "is": "=", "of": "=", ":": "="}
_SCORE = ("score", "accuracy", "acc")
_SAME_AS_PASSED = ("passed", "xfailed")


class _Claim(NamedTuple):
    """A claim, parsed.

    Attributes:
        kind: "number", "all tests", "test", or "" for what evidence cannot decide.
        name: of the metric or the test.
        low: least value that the claim allows.
        high: greatest one.
        strict: whether the limits themselves are excluded.
        number: as it was written, a percentage as a share.
        outcome: that a test is claimed to have.
        unit: of the number, if one was given.
    """

    text: str
    kind: Literal["number", "all tests", "test", ""]
    name: str = ""
    low: float = -math.inf
    high: float = math.inf
    strict: bool = False
    number: float = math.nan
    outcome: str = ""
    unit: Unit | None = None


class _CheckedClaim(Part):
    """One claim and what the evidence states."""

    claim: str
    outcome: Outcome
    why: str
    cites: tuple[str, ...] = Field((), description='"path:line: what is written there", the contradicting ones first')


class CheckedClaims(Part):
    __doc__ = f"All claims of one ``assay verify-claim``. {RULE}"

    schema_id: Literal["assay.claims/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    evidence: tuple[str, ...]
    claims: tuple[_CheckedClaim, ...]

    @computed_field(description="0 all confirmed, 1 one is refuted, 3 one is undecided")  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        outcomes = {claim.outcome for claim in self.claims}
        if "refuted" in outcomes:
            return int(ExitCode.REGRESSION)
        return int(ExitCode.NO_VERDICT if "undecided" in outcomes else ExitCode.PASS)


def verify(evidence: Sequence[Path], says: Sequence[str]) -> CheckedClaims:
    """Check claims against all of the evidence together.

    Args:
        evidence: logs, JUnit files, reports or folders of runs, and whatever else a reader states something of.
        says: claims; several in one text are separated by a comma or semicolon and a space, or by a line end.

    Raises:
        UsageError: no claim was given, there is no such file, or no reader takes it.
        EvidenceError: a report is damaged.
    """
    claims = [_parse(part) for text in says for part in re.split(r"[,;]\s+|\n", text) if part.strip()]
    if not claims:
        raise UsageError("No claim was given.", 'for example --says "MMLU >= 0.60"', "name what is to be checked")
    stated = [statement for path in evidence for statement in statements_of(path)]
    checked = tuple(_check(claim, stated) for claim in claims)
    return CheckedClaims(evidence=tuple(map(str, evidence)), claims=checked)


def _parse(text: str) -> _Claim:
    """Parse one claim.

    "=" allows what rounds to the digits that are given; "~" one unit of the last digit; "~0.60+" is at least that.
    """
    text = " ".join(text.split()).strip(" .!")
    if _ALL.fullmatch(text):
        return _Claim(text, "all tests")
    match = _NUMBER.fullmatch(text)
    if match:
        return _of_number(text, match)
    test = _TEST.fullmatch(text)
    if test:
        return _Claim(
            text, "test", test["name"], outcome="passed" if test["outcome"].lower().startswith("pass") else "failed"
        )
    return _Claim(text, "")


def _of_number(text: str, match: re.Match[str]) -> _Claim:
    scale = 0.01 if match["percent"] else 1.0
    number = float(match["number"]) * scale
    mantissa, _, exponent = match["number"].lower().partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) * scale
    operator = _OPERATORS.get(match["op"], match["op"])
    about = bool(match["about"]) or operator == "~"
    slack = unit if about else 0.0
    low, high = number - slack, number + slack
    if match["plus"] or match["more"] or operator in (">", ">="):
        high = math.inf
    elif operator in ("<", "<="):
        low = -math.inf
    elif not about:
        low, high = number - unit / 2, number + unit / 2
    strict = operator in "<>" and not about
    given = unit_of(match["unit"]) if match["unit"] else None
    return _Claim(text, "number", match["name"].strip(), low, high, strict, number, unit=given)


def _check(claim: _Claim, stated: Sequence[Statement]) -> _CheckedClaim:
    """Check a claim against the statements."""
    tests = [statement for statement in stated if statement.kind == "test"]
    if claim.kind == "all tests":
        return _all_tests(claim, tests)
    if claim.kind == "test":
        return _one_test(claim, [test for test in tests if _means(claim.name, test)], tests)
    if claim.kind == "number":
        return _number(claim, stated)
    return _checked(
        claim, "undecided", "no evidence can decide this; a claim is METRIC OP NUMBER, all tests passed or TEST passed"
    )


def _checked(claim: _Claim, outcome: Outcome, why: str, cites: Iterable[Statement] = ()) -> _CheckedClaim:
    quoted = tuple(one_line(f"{cite.where}: {cite.text}", 300) for cite in list(cites)[:_MAX_CITES])
    return _CheckedClaim(claim=claim.text, outcome=outcome, why=why, cites=quoted)


def _all_tests(claim: _Claim, tests: list[Statement]) -> _CheckedClaim:
    if not tests:
        return _checked(claim, "undecided", "the evidence has no tests")
    bad = [test for test in tests if test.value in ("failed", "error")]
    if bad:
        return _checked(claim, "refuted", f"{listed(sorted({_short(commit) for commit in bad}))} failed", bad)
    open_ = [test for test in tests if test.value not in _SAME_AS_PASSED]
    if open_:
        return _checked(
            claim, "undecided", f"{len(open_)} of {len(tests)} tests have no outcome, or were skipped", open_
        )
    return _checked(claim, "confirmed", f"{len(tests)} tests, and each passed", tests)


def _one_test(claim: _Claim, statements: list[Statement], tests: list[Statement]) -> _CheckedClaim:
    if not statements:
        return _checked(claim, "undecided", f"the evidence has no test {claim.name}{_nearest(claim.name, tests)}")
    failed = [item for item in statements if item.value in ("failed", "error")]
    passed = [statement for statement in statements if statement.value in _SAME_AS_PASSED]
    says, otherwise = (passed, failed) if claim.outcome == "passed" else (failed, passed)
    if otherwise:
        return _checked(claim, "refuted", f"it {otherwise[0].value}", otherwise)
    if len(says) == len(statements):
        return _checked(claim, "confirmed", f"it {claim.outcome}", says)
    return _checked(claim, "undecided", "it has no outcome, or was skipped", statements)


def _number(claim: _Claim, stated: Sequence[Statement]) -> _CheckedClaim:
    numbers = [statement for statement in stated if statement.kind == "number" and isinstance(statement.value, float)]
    meant = [number for number in numbers if _means(claim.name, number)]
    if not meant:
        return _checked(claim, "undecided", f"the evidence states no {claim.name}{_nearest(claim.name, numbers)}")
    if claim.number > 1 and _are_shares(meant):
        said = f"{claim.name} is a share from 0 to 1; write {claim.number:g} % if that is meant"
        return _checked(claim, "undecided", said, meant)
    if claim.unit:
        fitting = [statement for statement in meant if statement.unit and statement.unit.kind == claim.unit.kind]
        if not fitting:
            return _checked(claim, "undecided", f"the evidence does not state {claim.name} in that unit", meant)
        meant = fitting
    against = [statement for statement in meant if not _holds(claim, _in_unit(claim, statement))]
    values = listed(list(dict.fromkeys(f"{_in_unit(claim, statement):g}" for statement in against or meant)))
    return _checked(claim, "refuted" if against else "confirmed", f"the evidence states {values}", against or meant)


def _are_shares(statements: Sequence[Statement]) -> bool:
    """Return True if these are scores as shares of 1, and not all are 0."""
    values = [float(statement.value) for statement in statements]
    scores = any(_key(name).endswith(_SCORE) for statement in statements for name in statement.names)
    return scores and any(value > 0 for value in values) and all(0 <= value <= 1 for value in values)


def _in_unit(claim: _Claim, statement: Statement) -> float:
    """Convert a stated number to the unit of the claim."""
    scale = statement.unit.size / claim.unit.size if claim.unit and statement.unit else 1.0
    return float(statement.value) * scale


def _holds(claim: _Claim, value: float) -> bool:
    if claim.strict:
        return claim.low < value < claim.high
    edge = 1e-9 * max(1.0, abs(claim.number))
    return claim.low - edge <= value <= claim.high + edge  # false for NaN


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _core(name: str) -> str:
    """Strip a name of a word for a score.

    That is what "MMLU", "MMLU score" and "mmlu_accuracy" have in common, and what "accuracy" and "acc" have: nothing else.
    """
    key = _key(name)
    return next((key.removesuffix(word) for word in _SCORE if key.endswith(word)), key)


def _means(said: str, statement: Statement) -> bool:
    return any(_core(word) == _core(name) for name in statement.names for word in (said, spelled(said)))


def _short(statement: Statement) -> str:
    return statement.names[0].rpartition("::")[2]


def _nearest(name: str, among: Iterable[Statement]) -> str:
    names = list(dict.fromkeys(_short(name) for name in among))
    near = difflib.get_close_matches(name, names, 3, 0.4) or names[:3]
    return f"; it has {listed([one_line(name, 60) for name in near])}" if near else ""
