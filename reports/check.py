"""The documents of a kernel's calls, from the matrix or recorded, and of a pack of such calls; and a result as text."""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from assay.harness.conditions import BORDER_TOKENS, has_cached_prefix
from assay.harness.evidence.kernel_result import Coverage, Gap, KernelResult, Tried, Value
from assay.harness.evidence.pack import PackManifest, replay_command
from assay.harness.localize.features import words
from assay.harness.progress import duration
from assay.harness.text import counted, few, listed, met, one_line, times
from assay.harness.verdict import CONTRACT_BROKEN, OPERATOR, UNEXPLAINED, cause_of, serious
from assay.reports.document import (
    Block,
    CaseResult,
    Cell,
    Code,
    Document,
    Findings,
    Items,
    Line,
    Row,
    Section,
    Suite,
    Table,
)
from assay.reports.terminal import explaining, plain_text
from assay.reports.wording.say import said_finding

_MAX_REFUSALS = 3
# Findings whose page shows no code: they stand for no bug of its own.
_WITHOUT_CODE = (CONTRACT_BROKEN, OPERATOR, UNEXPLAINED)
# Most values of an axis that one line names.
_MAX_VALUES = 4
# A line says how far calls reached with nearly all values, and names the exceptions: fewer than one in this many.
_FEWER = 8
# Most wrong kernels whose causes one line names.
_MAX_CAUSES = 3
# Most rows of one label of the first screen.
_MAX_ROWS = 3
_WRONG = {
    "output": "wrong", "lse-wrong": "log-sum-exps wrong", "input-written": "input overwritten",
    "returned": "output of another shape, dtype or device", "outside": "memory outside its tensors written",
}  # fmt: skip
"""Text for each kind of fault; other faults are such text already."""


def _not_covered(result: KernelResult) -> list[str]:
    """The gaps: what its declaration leaves out, and what it refused, with the reason."""
    gaps = result.coverage.gaps
    declared = [_gap(gap) for gap in gaps if not gap.why]
    lines = [_gap(gap) for gap in gaps if gap.why]
    more = len(lines) - _MAX_REFUSALS
    return declared + lines[:_MAX_REFUSALS] + ([f"and {counted(more, 'more refusal')}"] if more > 0 else [])


def _gap(gap: Gap) -> str:
    extent = f" ({counted(gap.calls, 'call')})" if gap.calls else ""
    if not gap.why:
        return f"{gap.what}, by declaration{extent}"
    return f"{gap.what or f'some, as {gap.example}'}{extent}: {one_line(gap.why)}"


def _covered(coverage: Coverage) -> list[tuple[str, str]]:
    """Return the values that calls had, by condition. Only some combinations are tried, so they must not read as a product."""
    rows = [(axis, ", ".join(values)) for axis, values in coverage.values.items()]
    for phase, reach in coverage.reach.items():
        if phase == "extend":
            rows += [(f"{phase}, new tokens", _met(reach.new)), (f"{phase}, cached prefix", _met(reach.behind))]
        rows.append((f"{phase}, keys", _met(reach.keys)))
        rows.append((f"{phase}, sequences", ", ".join(f"{number:,}" for number in reach.sequences)))
    return rows + ([("log-sum-exps", counted(coverage.lses, "call"))] if coverage.lses else [])


def _together(coverage: Coverage) -> tuple[str, list[tuple[str, str]]]:
    """Say how far calls reached with nearly all of the listed values, and return the values that reached less or more."""
    each, less, more = list[str](), list[tuple[str, str]](), list[tuple[str, str]]()
    for phase, reach in coverage.reach.items():
        mets = [(axis, value, met) for axis, some in reach.met.items() for value, met in some.items()]
        shared = []
        for count, what in _counts(phase) if mets else []:
            ends = {(axis, value): getattr(met, count) for axis, value, met in mets}
            lasts = sorted(last for _, last in ends.values())
            most = next(last for last in lasts if 2 * last >= lasts[len(lasts) // _FEWER])
            shared.append(f"{most:,} {what}")
            fewer = [f"{axis} {value} ({last:,})" for (axis, value), (_, last) in ends.items() if last < most]
            less += [(f"fewer {what} in {phase}", few(fewer, _MAX_VALUES))] if fewer else []
            further = {
                axis: [v for (a, v), (_, last) in ends.items() if a == axis and last > 2 * most] for axis in reach.met
            }
            only = [
                f"{axis} {few(some, _MAX_VALUES)}" for axis, some in further.items() if len(some) < len(reach.met[axis])
            ]
            more += [(f"over twice as many {what} in {phase}", ", ".join(only))] if any(further.values()) else []
        each += [f"{phase} up to {listed(shared)}"] if shared else []
    return (f"With each of these values: {'; '.join(each)}" if each else ""), [*less, *more]


def _counts(phase: str) -> list[tuple[str, str]]:
    return [("new", "new tokens")] * (phase == "extend") + [("keys", "keys"), ("sequences", "sequences")]


def _span(numbers: tuple[int, int]) -> str:
    first, last = numbers
    return "no common number of" if first > last else f"{first:,} to {last:,}" if first < last else f"{first:,}"


def _reaches(coverage: Coverage) -> list[Block]:
    """Tabulate how far calls reached with each value of an axis, and with all pairs of two axes."""
    made: list[Block] = []
    for phase, reach in coverage.reach.items():
        counts = _counts(phase)
        columns = [what for _, what in counts]
        rows = [
            (axis, value, *(_span(getattr(met, count)) for count, _ in counts))
            for axis, some in reach.met.items()
            for value, met in some.items()
        ]
        pairs = [
            (axes, f"{pair.met} of {pair.of}", *(_span(getattr(pair, count)) for count, _ in counts))
            for axes, pair in reach.pairs.items()
        ]
        note = "A range has no gap of more than a factor of four. A kernel that is wrong outside these ranges may pass."
        made.append(Table(("axis", "value", *columns), rows, f"{phase}: tested with each value", note))
        note = "The lengths that all tested pairs of values share. A pass says nothing about three values together."
        made.append(Table(("axes", "pairs tested", *columns), pairs, f"{phase}: tested with each pair of values", note))
    return made


def _met(lengths: Sequence[int]) -> str:
    return met([(length, length) for length in lengths], BORDER_TOKENS)


def message(result: KernelResult) -> str:
    """The complete result as plain text: the message of a failed assertion, whose first line pytest's summary shows."""
    # pytest's summary and CI systems cut off the end of the first line, so it has the cause first.
    return f"{_cause_first(result)}\n\n{plain_text(_body(result))}"


def _cause(results: Sequence[KernelResult]) -> str:
    """Return each kernel's defect, as in "last partial block of 64 lost; 74 of 107 calls", or an empty string if none is serious.

    If a kernel has several results, such as one for each case, its cause is the bug that explains most failing calls.
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
        failing, calls = sum(len(result.failing) for result in mine), sum(result.calls for result in mine)
        extent = f"; {failing} of {counted(calls, 'call')}" if failing else ""
        if id_ not in titles:
            from assay.harness.attention.bugs.family import BY_ID  # imports torch, which few users of a result need

            titles[id_] = BY_ID[id_].title
        named.append((kernel, f"{titles[id_]}{extent}"))
    if len(named) < 2:
        return "".join(words for _, words in named)
    more = f"; and {counted(len(named) - _MAX_CAUSES, 'more kernel')}" if len(named) > _MAX_CAUSES else ""
    return "; ".join(f"{kernel}: {words}" for kernel, words in named[:_MAX_CAUSES]) + more


def _cause_first(result: KernelResult) -> str:
    """The cause's title and the numbers, for lines whose end is cut off."""
    why = _cause([result])
    return f"{why}: {result.extent()}" if why else result.summary()


def sentence(results: Sequence[KernelResult]) -> str:
    """Summarise several kernels in a line, cause first: "no mask; 61 of 74 calls; 2 kernels, 148 calls, worst 9.1 × its bound"."""
    kernels = len({result.kernel for result in results})
    calls = sum(result.calls for result in results)
    worst = max((result.worst for result in results if result.worst_bound is not None), default=None)
    refused = sum(len(result.refused) + len(result.excluded) + result.left_out for result in results)
    parts = [f"{kernels} kernel{'s' * (kernels != 1)}", f"{calls} call{'s' * (calls != 1)}"]
    parts += [f"worst {times(worst)} its bound"] if worst is not None else []
    parts += [f"{refused} not covered"] if refused else []
    why = _cause(results)
    return f"{why}; {', '.join(parts)}" if why else ", ".join(parts)


def check_document(result: KernelResult, verbose: bool = False) -> Document:
    """Build the document: the findings, the failing calls, what was covered and what was not, and the commands to reproduce it.

    Args:
        result: the check's result.
        verbose: whether it shows the traceback of a kernel that raises.
    """
    undecided = result.recorded and result.verdict == "inconclusive"
    return Document(
        command="replay" if result.recorded else "check",
        title=one_line(result.kernel, 60),
        verdict=result.verdict,
        word="partial pass" if result.quick and result.verdict == "pass" else "",
        headline=f"{'; '.join(result.missing)}." if undecided else f"{result.summary()}.",
        first=_first(result),
        screen=_screen(result),
        crumbs=[
            Cell(one_line(result.kernel, 80), code=True),
            f"{counted(result.computed, 'call')} computed, {len(result.refused):,} refused",
            f"{result.seconds:.1f} s",
        ],
        body=_body(result, result.traceback if verbose else ""),
        suites=[_suite(result)],
        result=result,
    )


def _first(result: KernelResult) -> str:
    """Return the first line of a terminal: the kernel's defect, on how many calls, and how long the check took."""
    cause = cause_of(result.findings)
    said = result.extent(cause.does if cause else "")
    return " · ".join([said, *([result.error] if result.verdict == "pass" else []), duration(result.seconds)])


def _screen(result: KernelResult) -> list[Row]:
    """Return the rows: the defect, where it shows, the smallest call, the next command; or what is missing or covered."""
    missing = [Row("Missing" * (not n), one_line(text, 160)) for n, text in enumerate(result.missing[:_MAX_ROWS])]
    wrong, rows = serious(result.findings), list[Row]()
    for finding in map(said_finding, wrong[:1]):
        rows.append(Row("Observed", one_line(finding.operator or finding.sentence, 200), picture=finding.picture))
    rows += (
        [Row("Also wrong", few([one_line(finding.title, 60) for finding in wrong[1:]], _MAX_ROWS))] if wrong[1:] else []
    )
    if (tried := result.tried) is not None and not tried.outside:
        rows.append(
            Row(
                "Fails at" if tried.always else "Fails only",
                f"{_condition(tried)}: {tried.wrong} of {tried.wrong} tries; right at {tried.right} of {tried.right} others"
                if tried.always
                else f"where {_condition(tried)}; right at {tried.right} of {tried.right} others",
            )
        )
    elif result.axes:
        axis = result.axes[0]
        rows.append(
            Row(
                "Fails at", f"{axis.name} {_ranges(axis.wrong, axis.right)}; right at {_ranges(axis.right, axis.wrong)}"
            )
        )
    rows += [Row("Error", result.error.removeprefix("worst error "))] if wrong and result.error else []
    rows += [Row("Smallest", one_line(result.smallest, 160))] if result.smallest else []
    if result.verdict == "pass" and (covered := _covered_briefly(result)):
        rows.append(Row("Covered", covered))
    rows = [*missing, *rows] if result.verdict == "inconclusive" else [*rows, *missing[:1]]
    if result.verdict == "inconclusive":
        rows += [
            Row("Not covered" * (not n), one_line(gap, 160)) for n, gap in enumerate(_not_covered(result)[:_MAX_ROWS])
        ]
    elif gaps := [_named(gap) for gap in result.coverage.gaps]:
        rows.append(Row("Not covered", few(gaps, 2)))
    return [*rows, *_next(result)]


def _next(result: KernelResult) -> list[Row]:
    """The next commands to run, or none for a kernel that no command can name."""
    steps: list[tuple[str, str]] = []
    if result.test and result.again:
        name = re.sub(r"\W+", "_", result.kernel.rpartition(":")[2])
        if written := re.search(r" --test[ =](\S+)", result.again):
            steps.append((f"python -m pytest {written[1]}", "fails until the kernel is right"))
        else:
            steps.append((f"{result.again} --test test_{name}.py", "writes a test that fails"))
    for finding in serious(result.findings)[:1]:
        about = "the meaning, and what to do" if finding.id in _WITHOUT_CODE else "wrong and right code"
        steps += [(command, about) for command in explaining(finding)]
    if result.verdict == "pass" and result.quick and " --quick" in result.again:
        steps = [(result.again.replace(" --quick", ""), "the whole matrix")]
    if not steps and result.again:
        steps = [(f"{result.again} --all", "everything found and covered")]
    return [Row("Next" * (not n), Cell(command, code=True), about) for n, (command, about) in enumerate(steps)]


def _covered_briefly(result: KernelResult) -> str:
    """Say in one line what calls covered; `_covered` has the details."""
    if result.recorded:
        return (
            f"{result.calls} of {counted(result.recorded, 'recorded call')}, {result.with_prefix} with a cached prefix"
        )
    values = result.coverage.values
    parts = [", ".join(values.get("dtype", ())), f"head_dim {', '.join(values.get('head_dim', ()))}"]
    parts += [f"{phase} to {max(reach.keys):,} keys" for phase, reach in result.coverage.reach.items() if reach.keys]
    return "; ".join([*parts, f"{counted(result.coverage.runs, 'run')} on {result.coverage.device}"])


def _named(gap: Gap) -> str:
    return (gap.what or gap.example) + (f" ({counted(gap.calls, 'call')})" if gap.calls else "")


def _body(result: KernelResult, traceback: str = "") -> list[Block]:
    body: list[Block] = [Section("Findings", [Findings(result.findings)], "findings")] if result.findings else []
    body += [Code(traceback)] if traceback else []
    if where := _where(result):
        body.append(Section("Where it is wrong", where, "where"))
    values, took = _covered(result.coverage), f"{result.seconds:.1f} s"
    covered = [f"Covered: {_covered_briefly(result)}; {took}."] if values and not result.recorded else []
    if result.recorded:
        of = f"{result.calls} of {counted(result.recorded, 'recorded call')}, {result.with_prefix} with a cached prefix"
        covered.append(f"Replayed: {of}; {took}.")
        covered += [f"The pack's {phase} calls: {text or 'none'}." for phase, text in result.envelope.items()]
        covered += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in result.not_tested]
    reached, others = _together(result.coverage)
    covered += [f"{reached}."] if reached else []
    covered += [f"Missing for a pass: {requirement}" for requirement in result.missing]
    covered += [f"Not covered: {gap}" for gap in _not_covered(result)]
    title = "Values that calls had, each by itself"
    tables = [Table(("condition", "values"), values, title, style="side-by-side")] if values else []
    tables += [Table(("calls with", "values"), others, "Exceptions", style="side-by-side")] if others else []
    body += [Section("What it covered", [Items(covered), *tables], "covered")] if covered else []
    if reaches := _reaches(result.coverage):
        body.append(Section("Tested together", reaches, "together", detail=True, folded=True))
    again: list[Block] = [Line(f"Smallest failing call: {result.smallest}")] if result.smallest else []
    again += (
        [Section("", [Code(result.test, "A test that reproduces it", "python")], detail=True)] if result.test else []
    )
    again += [Code(result.again, "Repeat this check")] if result.again else []
    return [*body, *([Section("See it again", again, "again")] if again else [])]


def _condition(tried: Tried) -> str:
    """Say on which sequences a kernel is wrong, and which part of them unless it is the output."""
    fault = f"{_WRONG.get(tried.fault, one_line(tried.fault))} where " * (tried.fault != "output")
    return f"{fault}{words((*tried.rule, *tried.part), tried.context)}"


def _where(result: KernelResult) -> list[Block]:
    """The condition that was tested, and the axes of the smallest failing call."""
    made: list[Block] = []
    if (tried := result.tried) is not None:
        drawn = f"wrong in {tried.wrong} of {tried.wrong} sequences that meet this, right in {tried.right} of {tried.right} others"
        lists = any(prop.kind == "in" and not isinstance(prop.values[0], str) for prop in tried.rule)
        among = f"Within {words((), tried.context)}: " if tried.context else ""
        exactly = "" if any(prop.right for prop in tried.rule) else "exactly "
        where = f"{exactly if tried.always else 'only '}where {words(tried.rule)}" if tried.rule else "on every call"
        said = f"{among}{_WRONG.get(tried.fault, one_line(tried.fault))} {where}"
        outside = " It is wrong outside of this too." * (tried.outside > 0)
        listed_ = " A list contains the tested values." if lists else ""
        part = f" In such a sequence, only where {words(tried.part)}." if tried.part else ""
        rivals = "".join(f", or where {words(rule)}, which no call separates" for rule in tried.rivals)
        checked = f"On calls drawn to refute it: {drawn}. Nothing in {counted(tried.calls, 'call')} contradicts it."
        if not tried.always:
            checked = f"All {tried.right:,} others that were run are right; {tried.wrong:,} that meet this are wrong."
        made = [
            Line(f"{said[0].upper()}{said[1:]}{rivals}.{part}"),
            Line(f"{checked}{outside}{listed_}", "quiet"),
        ]
    if result.by_numbers:
        made.append(Line("The error depends on the numbers: the same call is wrong with some and right with others."))
    rows = [(axis.name, _ranges(axis.wrong, axis.right), _ranges(axis.right, axis.wrong)) for axis in result.axes]
    if rows:
        made.append(Table(("Varied around the smallest call", "Wrong", "Right"), rows, style="side-by-side"))
    return made


def _ranges(values: Sequence[Value], others: Sequence[Value]) -> str:
    """Values as tested; numbers with no other value between them as a range."""
    numbers, borders = ([v for v in some if not isinstance(v, str)] for some in (values, others))
    parts = ["calls without a feature" if v == "nothing" else v for v in values if isinstance(v, str)]
    runs = {bisect(borders, n): [m for m in numbers if bisect(borders, m) == bisect(borders, n)] for n in numbers}
    parts += [f"{run[0]:g}" if len(run) == 1 else f"{run[0]:g} to {run[-1]:g}" for run in runs.values()]
    return ", ".join(parts) or "none"


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
        "worst error as a multiple of its bound": worst,
        "findings": " ".join(finding.id for finding in result.findings),
        "reproduce": result.again,
    }
    case = CaseResult(
        "verdict", f"assay.check.{result.kernel}", result.verdict, _cause_first(result), message(result).splitlines(),
        result.seconds,
    )  # fmt: skip
    return Suite("assay check", [case], properties)


def pack_document(manifest: PackManifest, pack: Path) -> Document:
    """Build the document of a recorded pack: the calls by phase and cached prefix, and the command that replays them."""
    strata: dict[tuple[str, str], list[tuple[int | None, int]]] = {}
    for call in manifest.calls:
        cached = "yes" if has_cached_prefix(call.prefix) else "no"
        strata.setdefault((call.spec.phase, cached), []).append((call.spec.layer, call.bytes))
    rows = [
        (
            *stratum,
            f"{len(calls)}",
            f"{len({layer for layer, _ in calls})}",
            f"{sum(size for _, size in calls) / 2**20:.1f}",
        )
        for stratum, calls in sorted(strata.items(), reverse=True)
    ]
    too_large = f"; {manifest.too_large} were too large" if manifest.too_large else ""
    return Document(
        command="record",
        title=str(pack),
        verdict=None,
        headline=f"Recorded {len(manifest.calls)} of {counted(manifest.seen, 'call')}{too_large}: {pack}",
        body=[
            Table(("phase", "cached prefix", "calls", "layers", "MiB"), rows, numbers=(2, 3, 4)),
            Line(f"Replay: {replay_command(pack)}"),
        ],
        exit_code=0,
        result=manifest,
    )
