"""Sentences about a verdict: its headline, its reasons, and the titles of its suites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from assay.harness.conditions import BORDER_TOKENS
from assay.harness.drivers.sweep.spec import SweepResult
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.judge.judgement import LENGTH_RATIO, Judgement, SuiteVerdict
from assay.harness.judge.report import Report, SuiteResult
from assay.harness.text import counted, listed, met, one_line
from assay.harness.verdict import WORST_FIRST, Check, Finding, Verdict, cause_of
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import measured_of, said_finding, say, says
from assay.reports.wording.sides import sides_said

NOT_RUN = "not run"
"""Text for a cell of a sweep that was not run."""
_TITLES = {
    "greedy": "Greedy texts", "logits": "Logits", "layers": "Layers", "matrix": "Op-level matrix",
    "latency": "Latency",
}  # fmt: skip


def suite_title(suite: SuiteVerdict) -> str:
    """Name a suite, such as "Greedy texts" or "Questions of gsm8k"."""
    return title_of_suite(suite.id, suite.asked)


def title_of_suite(id: str, asked: str) -> str:
    """Name a suite by its id and the data set of its questions."""
    if id == "accuracy":
        # Data sets whose answers are not letters.
        free = asked.partition(":")[0] == "gsm8k"
        return f"{'Questions' if free else 'Multiple-choice questions'}{f' of {asked}' if asked else ''}"
    return asked or _TITLES.get(id, id)


def headline(result: Judgement) -> str:
    """Say the verdict in one sentence."""
    return _words(result)[0]


def reasons(result: Judgement) -> list[str]:
    """Say why a result has its verdict, most important first."""
    return _words(result)[1]


def _words(result: Judgement) -> tuple[str, list[str]]:
    if isinstance(result, Report):
        return _of_report(result)
    assert isinstance(result, InvarianceResult)
    return say(result.decided), [
        *(said_finding(finding).sentence for finding in result.findings), *map(unmet_sentence, result.unmet),
    ]  # fmt: skip


def sides_of(report: Report) -> tuple[str, str]:
    """Name a report's candidate and its reference."""
    reference, candidate = report.reference, report.candidate
    return sides_said(report.treatment, reference.backend, candidate.backend, (reference.engine, candidate.engine))


def _of_report(report: Report) -> tuple[str, list[str]]:
    if failure := report.failure:
        todo = f"What to do: {failure.do.rstrip('.')}." if failure.do else failure.found
        said = f"the{failure.found[3:]}" if failure.found.startswith("The ") else failure.found
        return f"No verdict: {said}", [todo]
    candidate, _ = sides_of(report)
    cause, scope = cause_of(report.findings[: report.causes]), _scope_of(report)
    text, why = _verdict_of(report.verdict, candidate, report.suites, report.checks, cause, report.left_out, scope)
    return f"{'Partial run: ' * bool(report.left_out)}{text}", why


def _verdict_of(
    verdict: Verdict, candidate: str, suites: Sequence[SuiteVerdict], checks: Sequence[Check], cause: Finding | None = None,
    left_out: Sequence[str] = (), scope: str = "",
) -> tuple[str, list[str]]:  # fmt: skip
    """Say a verdict on a candidate and its reasons.

    Args:
        cause: the finding that says what a wrong kernel does, or None.
    """
    unmet = [unmet_sentence(check) for check in checks if check.status in ("failed", "missing")]
    regressed = [suite for suite in suites if suite.verdict == "regression"]
    if verdict == "regression":
        why = [said_finding(cause).sentence] if cause else []
        return f"Do not merge: {candidate} {_wrong(regressed, cause)}.", [*why, *map(_sentence, regressed), *unmet]
    if verdict == "pass":
        passed = f"{candidate} {_passed(suites, left_out, scope)}{_not_executed(checks)}."
        return passed, [_sentence(suite) for suite in suites]
    undecided = [_sentence(suite) for suite in suites if suite.verdict != "pass"] if suites else ["No suite ran."]
    return f"Inconclusive: not enough evidence about {candidate}.", [*unmet, *undecided]


def unmet_sentence(check: Check) -> str:
    """Say that a requirement is not met, and what would resolve it."""
    said = said_check(check)
    return f"{said.title}: {said.found}." + (f" To resolve: {said.settles}." if said.settles else "")


def _sentence(suite: SuiteVerdict) -> str:
    return f"{suite_title(suite)}: {say(*suite.why)}"


def _passed(suites: Sequence[SuiteVerdict], left_out: Sequence[str], scope: str) -> str:
    """Say what a candidate passed, as text that follows its name."""
    scope = f", {scope}" if scope else ""
    if not left_out:
        return f"is no worse than the reference, within the stated margins{scope}"
    out = f"{listed(left_out)} {'was' if len(left_out) == 1 else 'were'} left out"
    return f"passes {listed([suite.id for suite in suites])}{scope}; {out}"


def _not_executed(checks: Sequence[Check]) -> str:
    """Say that the execution of a candidate's own kernels was not shown, or return an empty string if it was."""
    phases = [c.part for c in checks if c.requirement == "kernel-executed" and c.status == "not checked"]
    return (
        f"; it is not shown that its own kernels ran in {listed(phases)}, because their names are not known"
        if phases
        else ""
    )


def _wrong(regressed: Sequence[SuiteVerdict], cause: Finding | None) -> str:
    """Say what the candidate does wrong, and how it shows, as text that follows its name."""
    shown = next(filter(None, map(_shown_by, regressed)), "")
    shown = f" ({shown})" if shown else ""
    if cause is not None and cause.does:
        return f"{cause.does}{shown}"
    worse = "slower" if {suite.id for suite in regressed} == {"latency"} else "worse"
    return f"is {worse} than the reference{f': {cause.title}' if cause else ''}{shown}"


def _shown_by(suite: SuiteVerdict) -> str:
    """Say how the regression of a suite shows: by accuracies, or by its deciding number."""
    if not isinstance(suite, SuiteResult):
        return ""
    if suite.id == "accuracy" and len(suite.tallies) == 2 and suite.decided_by != LENGTH_RATIO:
        before, after = (tally.right / tally.total if tally.total else 0.0 for tally in suite.tallies)
        return f"accuracy {before:.3f} → {after:.3f}"
    if suite.deciding_metric:
        return f"{measured_of(suite.deciding_metric).title} {measured_of(suite.deciding_metric).text}"
    return ""


def _scope_of(report: Report) -> str:
    """Say what a pass covers: "on the tiny model: 260 questions, extend at 48 of 1 to 256 tokens in batches of 1 to 9"."""
    asked = next((suite for suite in report.suites if suite.id == "accuracy" and suite.tallies), None)
    reach = [f"{asked.tallies[0].total:,} {'synthetic ' if asked.synthetic else ''}questions"] if asked else []
    for phase, compared in report.envelope.compared.items() if report.envelope else ():
        by_server = report.envelope.served.get(phase, {}) if report.envelope else {}
        lengths, served = (met(some.get("total-tokens", ()), BORDER_TOKENS) for some in (compared, by_server))
        words = f"{phase} at {lengths} tokens"
        reach.append(f"{words} in batches of {met(compared['batch'], 1)}{f' ({served} served)' * (served != lengths)}")
    model = report.environment.model
    name = one_line(model.rstrip("/").rpartition("/")[2] or model, 60)
    claimed = report.candidate.claimed_phases or (report.layers.phases if report.layers else ())
    others = [phase for phase in ("extend", "decode") if claimed and phase not in claimed]
    delegated = f"; the reference computes {' and '.join(others)}" if others else ""
    return f"on the {name} model{': ' if reach else ''}{', '.join(reach)}{delegated}"


@says
def _not_below_alpha(suites: int, p: float, alpha: float) -> str:
    return f"Holm's correction over {suites} suites gives p = {p:.2g}, not below {alpha:g}: no regression is shown."


def sweep_headline(result: SweepResult) -> str:
    """Count the cells of a sweep by verdict, the worst first."""
    counts = Counter(cell.verdict for cell in result.cells)
    parts = [f"{counts[verdict]} {verdict or NOT_RUN}" for verdict in (*WORST_FIRST, None) if counts[verdict]]
    return f"{counted(len(result.cells), 'cell')}: {', '.join(parts)}."
