"""The document of a checked kernel; and its result as text, for an assertion and in one line for several kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import Axis, Coverage, Gap, KernelResult
from assay.harness.text import counted, one_line, two_digits
from assay.harness.verdict import serious
from assay.reports.document import (
    Block,
    CaseResult,
    Cell,
    Code,
    Document,
    Findings,
    Items,
    Line,
    Only,
    Section,
    Suite,
    Table,
)
from assay.reports.terminal import finding_lines

MAX_REFUSALS = 3
_MAX_CAUSES = 3
"""Most wrong kernels whose causes one line names."""
_MAX_TEST = 3000
"""Most characters of a test that a terminal or an assertion shows: more are numbers."""
_TEST = "A test that reproduces it"


def _rows(axes: Sequence[Axis]) -> list[tuple[str, str, str]]:
    """A row per axis that matters: its name, the values with failing calls as "value (failing/calls)", the values without."""
    return [
        (axis.name, ", ".join(f"{v} ({bad}/{of})" for v, (bad, of) in axis.failing.items()), ", ".join(axis.right))
        for axis in axes
        if axis.right
    ]


def _indifferent(axes: Sequence[Axis]) -> str:
    """The axes for every value of which some call fails; empty if there are none."""
    right = {axis.name for axis in axes if axis.right}
    # "prefix" is that of one sequence of a call. Calls with 0 there may fail for the cached prefix of another one.
    names = [
        axis.name
        for axis in axes
        if axis.name not in right and not axis.unknown and (axis.name != "prefix" or "cached prefix" not in right)
    ]
    return f"fails for every value of {', '.join(names)}" if names else ""


def _not_covered(result: KernelResult) -> list[str]:
    """The gaps: what its declaration leaves out, and what it refused for which reason."""
    gaps = result.coverage.gaps
    declared = [_gap(gap) for gap in gaps if not gap.why]
    lines = [_gap(gap) for gap in gaps if gap.why]
    more = len(lines) - MAX_REFUSALS
    return declared + lines[:MAX_REFUSALS] + ([f"and {counted(more, 'more refusal')}"] if more > 0 else [])


def _gap(gap: Gap) -> str:
    extent = f" ({counted(gap.calls, 'call')})" if gap.calls else ""
    if not gap.why:
        return f"{gap.what}, by declaration{extent}"
    return f"{gap.what or f'some, as {gap.example}'}{extent}: {one_line(gap.why)}"


def _covered(coverage: Coverage) -> str:
    """The coverage in one line; empty if nothing was covered."""
    if not coverage.most:
        return ""
    parts = [f"{axis} {', '.join(values)}" for axis, values in coverage.values.items()]
    for phase, reach in coverage.most.items():
        new = f"{reach.new:,} new tokens, {reach.behind:,} behind a cached prefix, " if phase == "extend" else ""
        parts.append(f"{phase} to {new}{reach.keys:,} keys of a sequence and {counted(reach.sequences, 'sequence')}")
    parts += [f"log-sum-exps of {counted(coverage.lses, 'call')}"] if coverage.lses else []
    # Conditions are tried in some combinations only, so the line must not read as a product.
    limits = f"{'; '.join(parts)}; each limit by itself, not their combinations"
    return f"{limits}. {coverage.runs:,} runs on {coverage.device}"


def message(result: KernelResult) -> str:
    """The complete result as plain text: the message of a failed assertion, whose first line pytest's summary shows."""
    # Not the terminal's rendering of `check_document`: its lines are not wrapped to a width, and its first line, which pytest's
    # summary and CI systems cut off at its end, has the cause first. It also keeps what a page folds away, in the order of a log.
    lines = [_cause_first(result), ""]
    for finding in result.findings:
        lines += finding_lines(finding)
    if result.axes:
        lines += ["", f"fails exactly where: {result.where}"] if result.where else [""]
        table = [("axis", "fails (of calls)", "correct"), *_rows(result.axes)]
        widths = [max(len(row[column]) for row in table) for column in (0, 1)]
        lines += [f"  {name:<{widths[0]}}  {wrong:<{widths[1]}}  {right}" for name, wrong, right in table]
        lines += [f"  {_indifferent(result.axes)}"]
    lines += [f"covered: {covered}"] if (covered := _covered(result.coverage)) else []
    lines += [f"missing: {requirement}" for requirement in result.missing]
    lines += [f"not covered: {gap}" for gap in _not_covered(result)]
    if result.smallest:
        lines += ["", f"smallest failing call: {result.smallest}"]
    lines += [f"reproduce: {result.again}"] if result.again else []
    if result.test and len(result.test) <= _MAX_TEST:
        lines += ["as a test:", "", *(f"    {line}".rstrip() for line in result.test.splitlines())]
    return "\n".join(lines)


def _cause(results: Sequence[KernelResult]) -> str:
    """Return what is wrong, by kernel: "last partial block of 64 lost; 74 of 107 calls"; empty if no finding is serious.

    Where a kernel has several results, such as one for each case, its cause is the bug that explains most failing calls.
    """
    named = []
    for kernel in dict.fromkeys(result.kernel for result in results):
        mine = [result for result in results if result.kernel == kernel]
        explained: Counter[str] = Counter()
        for result in mine:
            for finding in serious(result.findings)[:1]:
                for id_ in (finding.id, *finding.equivalent):
                    explained[id_] += max(1, len(result.failing))
        if not explained:
            continue
        id_ = explained.most_common(1)[0][0]
        titles = {finding.id: finding.title for result in mine for finding in result.findings}
        failing, calls = (sum(counted) for counted in zip(*map(_failing, mine), strict=True))
        extent = f"; {failing} of {calls} calls" if failing else ""
        if id_ not in titles:
            from assay.harness.attention.bugs.family import BY_ID  # torch, which few of those who show a result need

            titles[id_] = BY_ID[id_].title
        named.append((kernel, f"{titles[id_]}{extent}"))
    if len(named) < 2:
        return "".join(words for _, words in named)
    more = f"; and {len(named) - _MAX_CAUSES} more kernels" if len(named) > _MAX_CAUSES else ""
    return "; ".join(f"{kernel}: {words}" for kernel, words in named[:_MAX_CAUSES]) + more


def _cause_first(result: KernelResult) -> str:
    """The cause's title and the numbers, for lines that are cut off at their end."""
    why = _cause([result])
    return f"{why}: {result.extent()}" if why else result.summary()


def _failing(result: KernelResult) -> tuple[int, int]:
    """Calls that fail, and calls that were tried."""
    return len(result.failing), result.calls


def sentence(results: Sequence[KernelResult]) -> str:
    """One line for several kernels, the cause first: "no mask; 61 of 74 calls; 2 kernels, 148 calls, worst 9.1 of its bound"."""
    kernels = len({result.kernel for result in results})
    calls = sum(result.calls for result in results)
    worst = max((result.worst for result in results if result.worst_bound is not None), default=None)
    refused = sum(len(result.refused) + len(result.excluded) + result.left_out for result in results)
    parts = [f"{kernels} kernel{'s' * (kernels != 1)}", f"{calls} call{'s' * (calls != 1)}"]
    parts += [f"worst {two_digits(worst)} of its bound"] if worst is not None else []
    parts += [f"{refused} not covered"] if refused else []
    why = _cause(results)
    return f"{why}; {', '.join(parts)}" if why else ", ".join(parts)


def check_document(result: KernelResult, verbose: bool = False) -> Document:
    """The findings, the calls that fail, what was covered and what was not, and how to see it again.

    Args:
        result: of the check.
        verbose: whether a terminal gets the traceback of a kernel that raises.
    """
    summary, gaps, shown = result.summary(), _not_covered(result), result.traceback if verbose else ""
    covered = [f"Covered: {words}."] if (words := _covered(result.coverage)) else []
    missing = [f"Missing for a pass: {requirement}" for requirement in result.missing]
    left: list[Block] = [
        Line(f"Missing: {requirement}") for requirement in result.missing if result.exit_code == ExitCode.NO_VERDICT
    ]
    left += [Line(f"Not covered: {gap}") for gap in gaps]
    body: list[Block] = [
        Only("terminal", [Line(f"{summary}. {result.seconds:.1f} s."), *map(Line, covered)]),
        Section("findings", "Findings", [Findings(result.findings)]),
        *([Only("terminal", [Code(shown)])] if shown else []),
        *_where(result),
        Only("terminal", left),
    ]
    if listed := [*covered, *missing, *(f"Not covered: {gap}" for gap in gaps)]:
        body.append(Only("page", [Section("covered", "What it covered", [Items(listed)])]))
    return Document(
        command="check",
        title=one_line(result.kernel, 60),
        verdict=result.verdict,
        headline=f"{summary}.",
        crumbs=[
            Cell(one_line(result.kernel, 80), code=True),
            f"{result.computed:,} calls computed, {len(result.refused):,} refused",
            f"{result.seconds:.1f} s",
        ],
        body=[*body, *_again(result)],
        suites=[_suite(result)],
        result=result,
        name="assay check",
    )


def _where(result: KernelResult) -> list[Block]:
    if not result.axes:
        return []
    blocks: list[Block] = [Line(f"Fails exactly where: {result.where}")] if result.where else []
    blocks.append(Table(("Axis", "Fails (of calls)", "Correct"), _rows(result.axes), style="side-by-side"))
    blocks += [Line(words, "quiet")] if (words := _indifferent(result.axes)) else []
    return [Section("where", "Where it is wrong", blocks)]


def _again(result: KernelResult) -> list[Block]:
    blocks: list[Block] = [Line(f"Smallest failing call: {result.smallest}")] if result.smallest else []
    blocks += reproducing(result.test)
    blocks += [Only("page", [Code(result.again, "Repeat this check")])] if result.again else []
    return [Section("again", "See it again", blocks)] if blocks else []


def reproducing(test: str) -> list[Block]:
    """A test that reproduces a wrong output; none where there is no such test. A terminal shows none of numbers."""
    if not test:
        return []
    short: list[Block] = [Line(f"{_TEST}:\n"), Code(test)]
    shown = (
        short
        if len(test) <= _MAX_TEST
        else [Line(f"{_TEST} holds the numbers of the call: --json and --html have it.")]
    )
    return [Only("page", [Code(test, _TEST)]), Only("terminal", shown)]


def _suite(result: KernelResult) -> Suite:
    """One case, so that one cause counts once in a CI system; its message starts with the cause."""
    worst = "" if result.worst_bound is None else f"{result.worst:.3g}"
    properties = {
        "verdict": result.verdict,
        "exit_code": str(int(result.exit_code)),
        "kernel": result.kernel,
        "calls": str(result.calls),
        "failing": str(len(result.failing)),
        "not covered": str(len(result.refused) + len(result.excluded) + result.left_out),
        "worst own error as a multiple of its bound": worst,
        "findings": " ".join(finding.id for finding in result.findings),
        "reproduce": result.again,
    }
    name, lines = f"assay.check.{result.kernel}", message(result).splitlines()
    return Suite(
        "assay check",
        [CaseResult("verdict", name, result.verdict, _cause_first(result), lines, result.seconds)],
        properties,
    )
