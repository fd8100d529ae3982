"""The document of a run: the reasons for its verdict, what to do, every suite, and what the verdict covers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.harness.judge.report import PassKernels, Report, SuiteResult
from assay.harness.progress import duration
from assay.harness.text import clip, counted, in_units, listed, one_line
from assay.harness.verdict import cause_of
from assay.reports import summary
from assay.reports.bench_report import calls_table, latency_section
from assay.reports.document import (
    Block,
    CaseResult,
    Cell,
    Code,
    Document,
    Facts,
    Findings,
    Line,
    Row,
    Section,
    Suite,
    Table,
    Words,
    checks_blocks,
)
from assay.reports.json_report import to_json
from assay.reports.layer_section import layer_diff_section
from assay.reports.operator_picture import one_query
from assay.reports.page import TEXT_SHOWN
from assay.reports.suite_section import suite_section
from assay.reports.terminal import explaining, plain_text
from assay.reports.wording.envelope import envelope_lines
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import measured_of, said_finding, say
from assay.reports.wording.servers import counted_calls, traced_kernels
from assay.reports.wording.verdict import headline, sides_of

_LOG, _LOG_LINE = 12, 300  # lines of a server's log outside the page, and their length
_MOST_MISSING, _MOST_SUITES = 3, 4  # rows of the first screen
_LABELS = {
    "accuracy": "Questions", "greedy": "Texts", "logits": "Logits", "layers": "Layers", "matrix": "Kernel",
    "latency": "Latency",
}  # fmt: skip
_SUITES = 12  # suites that a terminal and Markdown show
_COLUMNS = ("Suite", "Verdict", "Measured", "Bound", "Reference", "Candidate", "Differences")


def run_document(report: Report, page: str | Path = "") -> Document:
    """Build the document of a report, for every medium, with the path of its page, if it has one."""
    compared = " against ".join(sides_of(report))
    body = _body(report)
    return Document(
        command="run",
        title=compared,
        verdict=report.verdict,
        headline=headline(report),
        first=_first(report),
        screen=_screen(report),
        remedy=report.failure.do if report.failure else "",
        meaning=summary.MEANINGS[report.verdict],
        created=report.created,
        crumbs=[
            one_line(compared, 200),
            report.candidate.engine,
            f"{report.environment.device}, model {report.environment.model}",
            f"run {report.run_id}, {report.seconds:.0f} s",
            f"Exit code {report.exit_code}",
        ],
        body=body,
        foot=f"{report.schema_id}. Next to this file: report.json, the complete report, and records.jsonl, every answer.",
        suites=_cases(report, body),
        result=report,
        json=to_json,
        page=str(page),
    )


def _first(report: Report) -> str:
    """Return the first line of a terminal: the comparison and the model, or an empty string for a failure (see the headline)."""
    if report.failure:
        return ""
    model = report.environment.model.rstrip("/")
    parts = [
        " against ".join(sides_of(report)),
        *([f"without {listed(report.left_out)}"] if report.left_out else []),
        report.candidate.engine,
        model.rpartition("/")[2],
        duration(report.seconds),
    ]
    return " · ".join(one_line(part, 120) for part in parts if part)


def _screen(report: Report) -> list[Row]:
    """Return the few rows that decided a run, and the next commands."""
    if report.failure:
        return _failed_screen(report)
    unmet = [said_check(check) for check in summary.unmet(report) if check.status in ("failed", "missing")]
    missing = [
        Row("Missing" * (not n), one_line(f"{check.title}: {check.found}", 180))
        for n, check in enumerate(unmet[:_MOST_MISSING])
    ]
    steps = _next(report)
    if report.verdict == "pass":
        decided = [suite for suite in report.suites if suite.id == "accuracy"] or list(report.suites[:1])
        return [*map(_suite_row, decided), Row("Covers", _covers(report), "assay report --all")]
    if report.verdict != "regression":
        undecided = [suite for suite in report.suites if suite.verdict != "pass"]
        why = [
            Row(_LABELS.get(suite.id, suite.id), one_line(say(*suite.why), 180)) for suite in undecided[:_MOST_MISSING]
        ]
        return [*(missing + why or [Row("Why", one_line(headline(report), 180))]), *steps]
    shown = [suite for suite in report.suites if suite.verdict == "regression"][:_MOST_SUITES]
    others = [suite for suite in report.suites if suite not in shown]
    hidden = [f"{_LABELS.get(suite.id, suite.id)} ({suite.verdict})" for suite in others]
    hidden += [f"{counted(len(unmet), 'check')} could not be met"] if unmet else []
    more = [Row("Not shown", ", ".join(hidden), "assay report --all")] if hidden else []
    place = [Row("Place", one_line(_place(report), 240))] if report.parting and report.parting.place else []
    cause = _cause(report)
    if place and report.findings and not report.causes:  # says where answers were lost, which is not why
        cause = []
    told = [each for suite in report.suites for each in suite.why if each.id in ("witness", "no-witness")]
    opinion = [Row("Witness", one_line(say(each), 240)) for each in told]
    return [*cause, *place, *opinion, *map(_suite_row, shown), *more, *steps]


def _place(report: Report) -> str:
    """Say where the two servers first part on a sequence that both were traced on; an empty string where they were not."""
    row = report.parting
    if row is None:
        return ""
    if row.nowhere and report.verdict != "regression":
        outputs = f"the output{'s' if row.place == 'behind layers' else ''} of attention"
        outputs += " and of the layer" if row.place == "behind layers" else ""
        return f"in all {counted(row.layers, 'layer')} q, K, V and {outputs} agree within rounding"
    return say(row.inside).removeprefix("inside the model: ")


def _cause(report: Report) -> list[Row]:
    """Return the cause of a regression, with one query of its picture."""
    cause = summary.main_finding(report)
    if cause is None:
        return []
    said = cause_of([cause]) or cause
    where = said.where.replace(", with a cached prefix", "") if "prefix" in said.does else said.where
    words = f"{said.does}: {where}" if said.does else said_finding(cause).sentence
    drawn = [Row("", one_query(cause.picture))] if cause.picture else []
    return [Row("Cause", one_line(words, 180)), *drawn]


def _suite_row(suite: SuiteResult) -> Row:
    """Return the row of a suite: its measurement, and its policy's limit."""
    metric = summary.shown_metric(suite)
    if metric is None:
        return Row(_LABELS.get(suite.id, suite.id), one_line(say(*suite.why), 160))
    said = measured_of(metric)
    unit = next((unit for unit in ("point", "%", "nat") if said.text.rstrip("s").endswith(unit)), "")
    text = f"{said.title}: {said.text}"
    if suite.id == "accuracy" and len(suite.tallies) == 2 and metric.id == "loss-of-accuracy":
        before, after = (summary.accuracy_of(suite, role) for role in ("reference", "candidate"))
        text = f"accuracy {before} → {after}; {summary.differences(suite)} of {suite.tallies[0].total:,}"
    bound = summary.number(metric.bound)
    bound = in_units(bound, unit) if unit in ("point", "nat") else f"{bound} {unit}".rstrip()
    allowed = "" if metric.bound is None else f"allowed {bound}"
    return Row(_LABELS.get(suite.id, suite.id), one_line(text, 120), allowed)


def _covers(report: Report) -> str:
    """Say in a line what a pass covers: the questions, and the longest sequences of each phase."""
    asked = next((suite.tallies[0].total for suite in report.suites if suite.tallies), 0)
    lengths = [
        f"{phase} to {max(last for _, last in some['total-tokens']):,} tokens"
        for phase, some in (report.envelope.compared if report.envelope else {}).items()
        if some.get("total-tokens")
    ]
    covered = [each for suite in report.suites for each in suite.why if each.id == "probes-covered"]
    probes = [
        f"probes to {each.values['longest']:,} tokens, {each.values['depth']} of them in decode" for each in covered
    ]
    return "; ".join([*([counted(asked, "question")] if asked else []), *lengths, *probes]) or "see below"


def _next(report: Report) -> list[Row]:
    """Return the next steps after a run that did not pass: reproduce the cause without a server, explain it, or decide the run."""
    cause = summary.main_finding(report)
    if report.verdict == "regression" and cause is not None:
        steps = [(Cell(cause.reproduce, code=True), "no server" if cause.does else "")]
        steps += [(Cell(command, code=True), "wrong and right code") for command in explaining(cause)]
        return [Row("Next" * (not n), *step) for n, step in enumerate(steps)]
    steps_ = summary.next_steps(report)[-_MOST_MISSING:]
    return [
        Row("Next" * (not n), Cell(command, code=True) if command else one_line(text, 180))
        for n, (text, command) in enumerate(steps_)
    ]


def _failed_screen(report: Report) -> list[Row]:
    """Return the rows of a failure: what was compared, the last lines of the log, and what to do."""
    assert report.failure is not None
    shown = [line.strip() for line in report.failure.details.splitlines() if line.strip()]
    how = [] if not shown or shown[0].startswith("Its log") else [Row("Ended", one_line(shown[0], 160))]
    log = shown[len(how) :][-_MOST_MISSING:]
    return [
        Row("Run", f"{' against '.join(sides_of(report))} on the {report.environment.model} model"),
        *how,
        *(Row("Log" * (not n), one_line(line, 160)) for n, line in enumerate(log)),
        Row("Next", one_line(report.failure.do, 700)),
    ]


def _body(report: Report) -> list[Block]:
    cause = summary.main_finding(report)
    further = [finding for finding in report.findings if finding is not cause]
    title = "Cause" if report.verdict == "regression" else "Finding"
    undecided = report.verdict == "inconclusive" and report.failure is None
    table = Table(_COLUMNS, _rows(report.suites), numbers=(4, 5), style="cards", most=_SUITES)
    return [
        *([_checks(report, undecided)] if undecided else []),
        Section(title, [Findings([cause], "brief")] if cause else [], "cause"),
        Section("What shows it", _failure(report), "shown"),
        _steps(report),
        Section("Suites", [table] if report.suites else [], "suites"),
        Section("Further findings", [Findings(further, "folded")] if further else [], "findings", short="Findings"),
        *(
            suite_section(number, suite, number > _SUITES or report.failure is not None)
            for number, suite in enumerate(report.suites, 1)
        ),
        *([layer_diff_section(report.layers)] if report.layers else []),
        Section("Where the servers part", _parting(report), "parting", short="Place"),
        *([latency_section(report.latency)] if report.latency else []),
        Section("What this verdict covers", _envelope(report), "envelope", short="Covers"),
        *([] if undecided else [_checks(report)]),
        _calls(report),
        _environment(report),
    ]


def _parting(report: Report) -> list[Block]:
    if report.parting is None:
        return []
    said = f"Both servers computed {report.parting.probe}, layer by layer: {_place(report)}."
    return [Line(said)]


def _failure(report: Report) -> list[Block]:
    """Return the evidence of a failure: how the server ended, and its log, if any."""
    if report.failure is None or not report.failure.details:
        return []
    first, _, rest = report.failure.details.partition("\n")
    how, (title, _, log) = ("", (first, "", rest)) if first.startswith("Its log") else (first, rest.partition("\n"))
    short = "\n".join(line[:_LOG_LINE] for line in log.split("\n"))
    code = Code(clip(short, TEXT_SHOWN), most=_LOG)
    shown: Block = Section(title.rstrip(":"), [code], folded=True) if log else Line(title.rstrip(":"))
    return [*([Line(how)] if how else []), shown]


def _steps(report: Report) -> Section:
    steps = [Code(command, text) for text, command in summary.next_steps(report)]
    title = "To continue" if report.failure else "What to do"
    return Section(title, [Section("", steps, style="steps")] if steps else [], "next")


def _rows(suites: Sequence[SuiteResult]) -> list[tuple[Words, ...]]:
    """Make a row for each suite, with a link to its section."""
    rows: list[tuple[Words, ...]] = []
    for number, suite in enumerate(suites, 1):
        measured, bound, policy = summary.deciding(suite)
        name = Cell(summary.suite_title(suite), link=f"#suite-{number}")
        verdict = Cell(suite.verdict, suite.verdict, sign=suite.verdict)
        accuracies = (summary.accuracy_of(suite, role) for role in ("reference", "candidate"))
        rows.append((name, verdict, measured, Cell(bound, note=policy), *accuracies, summary.differences(suite)))
    return rows


def _envelope(report: Report) -> list[Block]:
    if report.envelope is None:
        return []
    *covered, uncovered = envelope_lines(report.envelope)
    needed = {True: ", but needed", False: ""}
    rows = [
        (row.phase, row.title, row.label, f"{row.calls:,}{needed[row.wanted and not row.calls]}")
        for row in report.envelope.rows
    ]
    note = "Counts are from the layer with the fewest."
    table = Table(("Phase", "Condition", "Bucket", "Compared calls"), rows, "", note, numbers=(3,), style="envelope")
    fold = Section("Compared calls by condition", [table], detail=True, folded=True)
    return [*map(Line, covered), Line(uncovered, "quiet after"), fold]


def _checks(report: Report, undecided: bool = False) -> Section:
    """Show the unmet checks; in an undecided run, these are what is missing."""
    unmet = summary.unmet(report)
    return Section(
        "What is missing" if undecided else "Checks",
        checks_blocks([*unmet, *(check for check in report.checks if check.status == "ok")]),
        "checks",
        detail=not unmet or report.failure is not None,
        short="Missing" if undecided else "",
    )


def _calls(report: Report) -> Section:
    """Show the attention calls of both servers and the traced kernels: in sentences, and below them as tables."""
    facts: list[tuple[Words, ...]] = []
    tables: list[Block] = []
    for role, server in (("reference", report.reference), ("candidate", report.candidate)):
        said = [one_line(counted_calls(call), 300) for call in server.calls]
        facts.append((role, one_line(server.backend), *(said or ["none counted"])))
        ready = "" if server.startup_s is None else f"; ready after {server.startup_s:.1f} s"
        claims = f"{server.backend}. Claims {', '.join(server.claimed_phases) or 'no phase'}{ready}."
        tables.append(Section("", [Line((Cell(role, role),)), Line(claims, "quiet"), calls_table(server.calls)]))
    inside: list[Block] = [Section("", tables, style="pair")]
    if report.kernels:
        about = "In one traced pass of each kind: proof that a backend's own kernels ran, and the other role's did not."
        inside.append(Section("Kernels that ran", [Line(about, "quiet"), *map(_kernels, report.kernels)]))
    fold = Section("By role, phase and kernel", inside, detail=True, folded=True)
    return Section("Attention calls counted", [Facts(facts, "small"), fold], "calls", short="Calls")


def _kernels(traced: PassKernels) -> Section:
    attention = {None: "not known", True: "yes", False: "no"}
    rows = [
        (Cell(kernel.name, code=True), kernel.kind, f"{kernel.launches:,}", attention[kernel.attention], kernel.of)
        for kernel in traced.kernels
    ]
    columns = ("Kernel", "Kind", "Launches", "Attention", "Of")
    return Section(traced_kernels(traced), [Table(columns, rows, numbers=(2,), style="kernels")], folded=True)


def _environment(report: Report) -> Section:
    environment = report.environment
    rows = [
        (Cell(name, code=True), Cell(values[0], code=True), Cell(values[1], code=True), why)
        for why, differing in (
            ("nobody asked for it", environment.argument_differences),
            ("follows from the treatment", environment.derived_arguments),
        )
        for name, values in differing.items()
    ]
    title = "Server arguments that differ besides the treatment"
    differ = Table(("Argument", "Reference", "Candidate", "Why"), rows, title)
    none = Line("The servers' arguments differ only in the treatment.", "quiet")
    names = ("device", "hardware", "python", "git", "model", "model_hash")
    facts = [(name.replace("_", " ").capitalize(), getattr(environment, name) or summary.NOTHING) for name in names]
    launched = [
        Code(server.launch_command, f"Launch command of the {role}")
        for role, server in (("reference", report.reference), ("candidate", report.candidate))
        if server.launch_command
    ]
    inside: list[Block] = [Facts([*facts, *environment.packages.items()], "small"), *launched]
    fold = Section("Hardware, model, versions, and how the servers were launched", inside, folded=True)
    return Section("Environment", [differ if rows else none, fold], "environment", detail=True)


def _cases(report: Report, body: Sequence[Block]) -> list[Suite]:
    """Make a suite with the verdict and the checks, and one per suite of the run."""
    prefix = f"assay.{_name(report.candidate.backend)}"
    said = [f"What to do: {report.failure.do}", ""] if report.failure else []
    said += [*plain_text(body).split("\n"), f"Repeat this run: {report.reproduce}"]
    verdict = CaseResult("verdict", prefix, report.verdict, headline(report), said, report.seconds)
    cases = [verdict, *(CaseResult.of(check, f"{prefix}.checks") for check in report.checks)]
    candidate, environment = report.candidate, report.environment
    properties = {
        "verdict": report.verdict, "exit_code": str(report.exit_code), "run_id": report.run_id,
        "reference": report.reference.backend, "candidate": candidate.backend, "engine": candidate.engine,
        "device": environment.device, "model": environment.model, "model_hash": environment.model_hash,
        "findings": " ".join(finding.id for finding in report.findings), "reproduce": report.reproduce,
    }  # fmt: skip
    ended_early = report.failure is not None
    suites = (_suite_case(suite, f"{prefix}.{_name(suite.id)}", ended_early) for suite in report.suites)
    return [Suite("assay", cases, properties, report.created), *suites]


def _suite_case(suite: SuiteResult, classname: str, ended_early: bool) -> Suite:
    properties = {"synthetic": str(suite.synthetic).lower()}
    for metric in suite.metrics:
        properties[metric.id] = measured_of(metric).text
        if metric.bound is not None:
            properties[f"bound of {metric.id}"] = summary.bound_and_policy(metric)
    said = f"{summary.suite_title(suite)}: {say(*suite.why)}"
    output = [
        said,
        *(f"accuracy: {tally.role} {summary.share(tally.right, tally.total)}" for tally in suite.tallies),
        f"differences: {summary.differences(suite)}",
        *(
            f"{row.id} ({row.title} {row.bucket}): reference {row.reference_right}/{row.items}, "
            f"candidate {row.candidate_right}/{row.items}, unparsed {row.candidate_unparsed}"
            for row in suite.conditions
            if row.items
        ),
    ]
    case = CaseResult("verdict", classname, suite.verdict, said, output)
    if ended_early and suite.verdict != "pass":  # one cause is one error: that of the run
        case = replace(case, outcome="not checked", message=f"the run ended early; {say(*suite.why)}", lines=())
    return Suite(suite.id, [case], properties)


def _name(text: str) -> str:
    """Make `text` one part of a class name: CI systems split names at dots, so a URL or a `module:function` must not add any."""
    return re.sub(r"[^\w-]+", "_", one_line(text, 100)) or "_"
