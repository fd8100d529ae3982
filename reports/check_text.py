"""The result of checking a kernel, as text: for an assertion, for a terminal, and in one line for several kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.harness.attention.hypotheses import BY_ID
from assay.harness.errors import ExitCode
from assay.harness.localize.axes import Axis
from assay.harness.offline.check import CheckResult
from assay.harness.offline.coverage import DECLARED
from assay.harness.text import counted, two_digits
from assay.harness.verdict import serious
from assay.reports.terminal import copy, finding_lines, finding_text, say, verdict_line

MAX_REFUSALS = 3
MAX_CAUSES = 3
"""Most wrong kernels whose causes one line names."""
MAX_TEST = 3000
"""Most characters of a test that a terminal or an assertion shows: more are numbers."""
TEST_OF_NUMBERS = "A test that reproduces it holds the numbers of the call: --json and --html have it."


def headline(result: CheckResult) -> str:
    """One sentence; see `CheckResult.summary`."""
    return result.summary()


def rows(axes: Sequence[Axis]) -> list[tuple[str, str, str]]:
    """A row per axis that matters: its name, the values with failing calls as "value (failing/calls)", the values without."""
    return [
        (axis.name, ", ".join(f"{v} ({bad}/{of})" for v, (bad, of) in axis.failing.items()), ", ".join(axis.right))
        for axis in axes
        if axis.right
    ]


def indifferent(axes: Sequence[Axis]) -> str:
    """The axes for every value of which some call fails; empty if there are none."""
    right = {axis.name for axis in axes if axis.right}
    # "prefix" is that of one sequence of a call. Calls with 0 there may fail for the cached prefix of another one.
    names = [
        axis.name
        for axis in axes
        if axis.name not in right and not axis.unknown and (axis.name != "prefix" or "cached prefix" not in right)
    ]
    return f"fails for every value of {', '.join(names)}" if names else ""


def not_covered(result: CheckResult) -> list[str]:
    """The gaps: what its declaration leaves out, and what it refused for which reason."""
    gaps = result.coverage.gaps
    declared = [gap.sentence for gap in gaps if gap.why == DECLARED]
    lines = [gap.sentence for gap in gaps if gap.why != DECLARED]
    more = len(lines) - MAX_REFUSALS
    return declared + lines[:MAX_REFUSALS] + ([f"and {counted(more, 'more refusal')}"] if more > 0 else [])


def message(result: CheckResult) -> str:
    """The complete result as plain text: the message of a failed assertion, whose first line pytest's summary shows."""
    lines = [cause_first(result), ""]
    for finding in result.findings:
        lines += finding_lines(finding)
    if result.failing and result.right:
        lines += ["", f"fails exactly where: {result.where}"] if result.where else [""]
        table = [("axis", "fails (of calls)", "correct"), *rows(result.axes)]
        widths = [max(len(row[column]) for row in table) for column in (0, 1)]
        lines += [f"  {name:<{widths[0]}}  {wrong:<{widths[1]}}  {right}" for name, wrong, right in table]
        lines += [f"  {indifferent(result.axes)}"]
    lines += [f"covered: {result.coverage.sentence}"] if result.coverage.sentence else []
    lines += [f"missing: {one}" for one in result.missing]
    lines += [f"not covered: {one}" for one in not_covered(result)]
    if result.smallest:
        lines += ["", f"smallest failing call: {result.smallest}"]
    lines += [f"reproduce: {result.again}"] if result.again else []
    if result.test and len(result.test) <= MAX_TEST:
        lines += ["as a test:", "", *(f"    {line}".rstrip() for line in result.test.splitlines())]
    return "\n".join(lines)


def cause(results: Sequence[CheckResult]) -> str:
    """What is wrong, by kernel: "last partial block of 64 lost; 74 of 107 calls"; empty if no finding is serious.

    Where a kernel has several results, such as one for each case, its cause is the bug that explains most failing calls.
    """
    found = []
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
        found.append((kernel, f"{titles[id_] if id_ in titles else BY_ID[id_].title}{extent}"))
    if len(found) < 2:
        return "".join(words for _, words in found)
    more = f"; and {len(found) - MAX_CAUSES} more kernels" if len(found) > MAX_CAUSES else ""
    return "; ".join(f"{kernel}: {words}" for kernel, words in found[:MAX_CAUSES]) + more


def cause_first(result: CheckResult) -> str:
    """The cause's title and the numbers, for lines that are cut off at their end."""
    why = cause([result])
    return f"{why}: {result.extent()}" if why else headline(result)


def _failing(result: CheckResult) -> tuple[int, int]:
    """Calls that fail, and calls that were tried."""
    return len(result.failing), len(result.computed) + len(result.broken)


def sentence(results: Sequence[CheckResult]) -> str:
    """One line for several kernels, the cause first: "no mask; 61 of 74 calls; 2 kernels, 148 calls, worst 9.1 of its bound"."""
    kernels = len({result.kernel for result in results})
    calls = sum(len(result.computed) + len(result.broken) for result in results)
    worst = max((result.worst.ratio for result in results if result.worst), default=None)
    refused = sum(len(result.refused) + len(result.excluded) + len(result.left_out) for result in results)
    parts = [f"{kernels} kernel{'s' * (kernels != 1)}", f"{calls} call{'s' * (calls != 1)}"]
    parts += [f"worst {two_digits(worst)} of its bound"] if worst is not None else []
    parts += [f"{refused} not covered"] if refused else []
    why = cause(results)
    return f"{why}; {', '.join(parts)}" if why else ", ".join(parts)


def render(result: CheckResult, console: Console, verbose: bool = False) -> None:
    """Print the result to a terminal; if verbose, with the traceback of a kernel that raises."""
    say(console, f"{headline(result)}. {result.seconds:.1f} s.")
    if result.coverage.sentence:
        say(console, f"Covered: {result.coverage.sentence}.")
    for finding in result.findings:
        say(console, finding_text(finding, console.width))
    if verbose and result.traceback:
        copy(console, result.traceback)
    if result.failing and result.right:
        if result.where:
            say(console, f"Fails exactly where: {result.where}")
        table = Table("axis", "fails (of calls)", "correct")
        for row in rows(result.axes):
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        say(console, indifferent(result.axes))
    if result.exit_code == ExitCode.NO_VERDICT:
        for one in result.missing:
            say(console, f"Missing: {one}")
    for one in not_covered(result):
        say(console, f"Not covered: {one}")
    if result.smallest:
        say(console, f"Smallest failing call: {result.smallest}")
    if result.test:
        if len(result.test) <= MAX_TEST:
            say(console, "A test that reproduces it:\n")
            copy(console, result.test)
        else:
            say(console, TEST_OF_NUMBERS)
        say(console, verdict_line(result.verdict, f"{headline(result)}."))  # the test may have filled the screen
