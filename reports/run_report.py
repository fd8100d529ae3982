"""The document of a run: a page with everything, and in brief for a terminal and for the comment of a pull request."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from assay.harness.judge.latency_result import ratio_text, worst_ratio
from assay.harness.judge.report import (
    ConditionRow,
    DivergenceRow,
    Flip,
    LogitsRow,
    Metric,
    PassKernels,
    Report,
    SuiteResult,
    excess,
    out_of_bounds,
)
from assay.harness.text import clip, counted, listed, one_line, visible
from assay.harness.verdict import Finding
from assay.reports import summary
from assay.reports.bench_report import calls_blocks, latency_blocks
from assay.reports.charts import interval_chart
from assay.reports.document import (
    Block,
    Box,
    CaseResult,
    Cell,
    Checks,
    Code,
    Document,
    Drawing,
    Entries,
    Entry,
    Facts,
    Findings,
    Fold,
    Items,
    Line,
    Only,
    Section,
    Suite,
    Table,
    Weights,
    Words,
)
from assay.reports.invariance import invariance_blocks
from assay.reports.json_report import to_json
from assay.reports.layer_section import layer_diff_section
from assay.reports.markdown import markdown_lines
from assay.reports.page import TEXT_SHOWN
from assay.reports.terminal import finding_lines
from assay.reports.words import counted_calls, envelope_lines, traced_kernels

FLIPS_SHOWN = 256
"""Most flips embedded for a suite; with texts cut at `TEXT_SHOWN` the page stays below a few megabytes."""
_COMMENT_LINES = 60
"""Most lines of a comment; the heading and the foot included."""
MAX_LAYERS = 12
"""Most layers that a terminal shows."""
_DIVERGENCES, _LOG, _BRIEF_LOG = 60, 300, 12
_COMMENT_LOG, _COMMAND_LINES, _COMMAND = 16, 3, 2_000
_SUITES = ("Suite", "Verdict", "Reference", "Candidate", "Differences", "Measured (interval)", "Bound")


def run_document(report: Report, page: str | Path = "") -> Document:
    """All that a report says, for every medium; with the path of its page, if there is one to name."""
    code = one_line(report.candidate.backend, 60), one_line(report.reference.backend, 60)
    compared = (Cell(report.candidate.backend, code=True), " against ", Cell(report.reference.backend, code=True))
    return Document(
        command="run",
        title=f"{code[0]} against {code[1]}",
        verdict=report.verdict,
        headline=report.headline,
        remedy=report.failure.do if report.failure else "",
        meaning=summary.MEANINGS[report.verdict],
        created=report.created,
        crumbs=[
            compared,
            report.candidate.engine,
            f"{report.environment.device}, model {report.environment.model}",
            f"run {report.run_id}, {report.seconds:.0f} s",
            f"Exit code {report.exit_code}",
        ],
        body=[
            Only("terminal", _brief(report)),
            Only("page", _page(report)),
            Only("markdown", _comment(report)),
            Only("github", _annotations(report)),
        ],
        contents=True,
        foot=f"{report.schema_id}. Next to this file: report.json, the complete report, and records.jsonl, every answer.",
        suites=_cases(report),
        result=report,
        json=to_json,
        page=str(page),
    )


def _annotations(report: Report) -> list[Block]:
    todo = [Line(reason) for reason in report.reasons[:1] if report.failure]
    return [*todo, Findings(report.findings), Checks(report.checks)]


def _brief(report: Report) -> list[Block]:
    """For a terminal: the verdict and why, suites, counted calls, unmet checks, findings, layers, envelope and latency."""
    unmet = summary.unmet(report)
    badge = Cell(f" {summary.SIGNS[report.verdict]} {report.verdict.upper()} ", report.verdict)
    head: list[Block] = [
        Line(""),
        Line((badge, f"  exit code {report.exit_code}")),
        Line(one_line(report.headline, 400), "strong"),
        Items([one_line(reason, 400) for reason in report.reasons]),
    ]
    if log := summary.failure_lines(report, _BRIEF_LOG):
        head += [Line(""), *(Line(f"  {line[:_LOG]}", "quiet") for line in log)]
    sections: list[tuple[str, list[Block]]] = [
        ("Suites", _brief_suites(report)),
        ("Attention calls counted", _brief_calls(report)),
        (
            "Kernels that ran in one traced pass of each kind",
            _items(list(map(traced_kernels, report.kernels)), 300),
        ),
        ("Checks that are not ok", [Checks(unmet)] if unmet else []),
        ("Findings", [Findings(report.findings, commands=True)] if report.findings else []),
        ("Layer diff", [*_items(_layer_diff(report), 400), *_layer_lines(report)]),
        ("Envelope", _items(envelope_lines(report.envelope), 700)),
        ("Latency", _items(_latency(report), 400)),
    ]
    return [*head, *(_section(title, blocks) for title, blocks in sections if blocks), Line("")]


def _items(lines: Sequence[str], most: int) -> list[Block]:
    """Lines of at most so many characters; no block without a line."""
    return [Items([one_line(line, most) for line in lines])] if lines else []


def _layer_diff(report: Report) -> list[str]:
    return summary.layer_diff_lines(report.layers) if report.layers else []


def _latency(report: Report) -> list[str]:
    return summary.latency_lines(report.latency) if report.latency else []


def _brief_suites(report: Report) -> list[Block]:
    if not report.suites:
        return []
    bounds = [line for line in map(summary.suite_line, report.suites) if line.policy]
    return [
        _suite_table(report.suites),
        *(Line(f"  bound of {line.suite} set by {line.policy}", "quiet") for line in bounds),
    ]


def _brief_calls(report: Report) -> list[Block]:
    servers = {"reference": report.reference, "candidate": report.candidate}
    if report.failure is not None and not any(server.calls for server in servers.values()):
        return []
    said = []
    for role, server in servers.items():
        calls = "; ".join(one_line(counted_calls(call), 300) for call in server.calls)
        said.append(f"{role} {one_line(server.backend)}: {calls or f'none counted ({one_line(server.engine)})'}")
    return [Items(said)]


def _section(title: str, blocks: Sequence[Block]) -> Section:
    return Section("", title, blocks, announced=True)


def _suite_table(suites: Sequence[SuiteResult]) -> Table:
    rows: list[tuple[Words, ...]] = []
    for row in map(summary.suite_line, suites):
        verdict = Cell(row.verdict, row.verdict, sign=row.verdict)
        rows.append((row.suite, verdict, row.reference, row.candidate, row.differences, row.measured, row.bound))
    return Table(_SUITES, rows, numbers=(2, 3))


def _layer_lines(report: Report) -> list[Block]:
    """Own errors by layer and cached prefix, of the layers with the largest error relative to its bound."""
    if report.layers is None:
        return []
    words: dict[str, list[str | Cell]] = {}
    worst: dict[str, float] = {}
    for grid in (grid for grid in report.layers.grids if grid.columns == "prefix"):
        for layer, prefix, error, bound in grid.observed():
            beyond = out_of_bounds(error, bound)
            shown = Cell(summary.error_percent(error) + ", out of bounds" * beyond, "beyond" if beyond else "")
            words.setdefault(layer, []).extend([f"{one_line(f'{grid.where}, prefix {prefix}')}: ", shown, "; "])
            worst[layer] = max(worst.get(layer, -1.0), excess(error, bound))
    most = sorted(words, key=lambda layer: -worst[layer])[:MAX_LAYERS]
    lines: list[Block] = [
        Line((f"  layer {one_line(layer):>3}  ", *parts[:-1])) for layer, parts in words.items() if layer in most
    ]
    left = len(words) - len(most)
    return lines + ([Line(f"  {left} more layers, none worse, in report.html")] if left else [])


def _page(report: Report) -> list[Block]:
    cause = summary.main_finding(report)
    further = [finding for finding in report.findings if finding is not cause]
    folds = [Fold(_finding_line(finding), [Findings([finding])]) for finding in further]
    passed = report.verdict == "pass"
    why = [Items(report.reasons, ordered=True)]
    blocks: list[Block] = []
    if cause:
        title = "Cause" if report.verdict == "regression" else "Finding"
        blocks.append(Section("cause", title, [Findings([cause], brief=True)]))
    blocks += _failure(report)
    blocks += [] if passed else _steps(report)
    blocks += [Section("why", "Why", why)] if report.reasons and not report.failure else []
    blocks += _steps(report) if passed else []
    blocks += _jumps(report)
    blocks += [Section("findings", "Further findings", folds, short="Findings")] if folds else []
    blocks += [_suite(f"suite-{number}", suite) for number, suite in enumerate(report.suites, 1)]
    blocks += [layer_diff_section(report.layers)] if report.layers else []
    if report.invariance:
        blocks.append(Section("invariance", "Features that must change nothing", invariance_blocks(report.invariance)))
    blocks += [Section("latency", "Latency", latency_blocks(report.latency), style="latency")] if report.latency else []
    return [*blocks, *_envelope(report), _checks(report), _calls(report), _environment(report)]


def _finding_line(finding: Finding) -> Words:
    return Cell(finding.severity, finding.severity), f" {finding.title}: {one_line(finding.where, 120)}"


def _failure(report: Report) -> list[Block]:
    """Return what shows a failure: how the server ended, and its log; none where nothing does."""
    if report.failure is None or not report.failure.details:
        return []
    first, _, rest = report.failure.details.partition("\n")
    if first.startswith("Its log"):
        how, title, log = "", first, rest
    else:
        how, (title, _, log) = first, rest.partition("\n")
    shown: Block = Fold(title.rstrip(":"), [Code(clip(log, TEXT_SHOWN), "Log")]) if log else Line(title.rstrip(":"))
    return [Section("shown", "What shows it", [*([Line(how)] if how else []), shown])]


def _steps(report: Report) -> list[Block]:
    steps = [Code(command, text) if command else Line(text) for text, command in summary.next_steps(report)]
    title = "To go on" if report.failure else "What to do"
    return [Section("next", title, [Box("steps", steps)])] if steps else []


def _jumps(report: Report) -> list[Block]:
    """A card for each suite, the layers and latency, which leads to its section."""
    rows: list[tuple[Words, ...]] = []
    for number, suite in enumerate(report.suites, 1):
        line, metric = summary.suite_line(suite), summary.shown_metric(suite)
        shown: tuple[Words, ...] = (Cell(line.measured, "quiet"),)
        if metric:
            accuracy = f"; accuracy {line.reference} → {line.candidate}" if suite.tallies else ""
            title = Cell(f"{one_line(metric.title, 60)}{accuracy}", "quiet")
            shown = (Cell(one_line(metric.text, 60), "figures"), title)
        rows.append(
            (Cell(line.suite, link=f"#suite-{number}"), Cell(suite.verdict, suite.verdict, sign=suite.verdict), *shown)
        )
    if layers := report.layers:
        judged = any(row.bound is not None for row in layers.depth)
        words = f"{layers.sources} out of bounds" if layers.sources else "within bounds" if judged else "no bound"
        status = Cell("layer diff", "serious" if layers.sources else "info")
        rows.append((Cell("Own error by layer", link="#layer-diff"), status, Cell(words, "figures")))
    if latency := report.latency:
        worst = worst_ratio(latency)
        ratio = summary.NOTHING if worst is None else ratio_text(worst.ratio, worst.low, worst.high)
        figure = Cell(latency.note, "quiet") if latency.note else Cell(ratio, "figures")
        status = Cell(latency.verdict, latency.verdict, sign=latency.verdict)
        rows.append((Cell("Latency by load", link="#latency"), status, figure))
    return [Facts(rows, "jumps")] if rows else []


def _suite(anchor: str, suite: SuiteResult) -> Section:
    badge: list[str | Cell] = [" ", Cell("synthetic questions", "badge")] if suite.synthetic else []
    sign = Cell(suite.verdict, suite.verdict, sign=suite.verdict)
    blocks: list[Block] = [Box("cards", list(map(_metric, suite.metrics)))] if suite.metrics else []
    blocks += [*_answers(suite), *_conditions(suite), *_flips(suite), *_logits(suite.logits), *_divergences(suite)]
    title = (sign, f" {suite.title}", *badge)
    return Section(anchor, title, blocks, short=one_line(suite.title, 40), style="suite", lead=suite.why,
                   folded=suite.verdict == "pass", sign=suite.verdict)  # fmt: skip


def _metric(metric: Metric) -> Box:
    limits = [f"Interval {summary.interval(metric)}."] if metric.low is not None else []
    limits += [f"Bound {summary.bound_and_policy(metric)}."] if metric.bound is not None else []
    says = f"{one_line(metric.title)}: {summary.number(metric.value)}, interval {summary.interval(metric)}"
    says += f", bound {summary.bound(metric)}" if metric.bound is not None else ""
    chart = interval_chart(says, metric.value, metric.low, metric.high, metric.bound)
    blocks: list[Block] = [Line(metric.text, "value"), Drawing(chart, wide=False)]
    blocks += [Line(" ".join(limits), "quiet")] if limits else []
    blocks += [Line(metric.explain, "quiet")] if metric.explain else []
    return Box("card", [Section("", metric.title, blocks)])


def _answers(suite: SuiteResult) -> list[Block]:
    if not suite.tallies:
        return []
    columns = ("Role", "Accuracy", "Right", "Wrong", "Unparsed", "Total", "Ran to limit")
    rows: list[tuple[Words, ...]] = [
        (
            Cell(tally.role, tally.role),
            Cell(summary.share(tally.right, tally.total), "strong"),
            *map(str, (tally.right, tally.wrong, tally.unparsed, tally.total, tally.ran_to_limit)),
        )
        for tally in suite.tallies
    ]
    note = "Answers that ran to the token limit are also counted as right, wrong or unparsed."
    return [Section("", "Answers", [Table(columns, rows, note=note, numbers=range(1, 7))])]


def _conditions(suite: SuiteResult) -> list[Block]:
    """A table for each condition that questions differ in; what they share, in a line."""
    alike, boxes = [], []
    for _, group in groupby(suite.conditions, key=lambda row: row.by):
        rows = tuple(group)
        seen = [row for row in rows if row.items]
        if len(seen) > 1:
            columns = (rows[0].title, "Items", "Reference", "Candidate", "Unparsed")
            boxes.append(Box("condition", [Table(columns, list(map(_condition, rows)), numbers=range(1, 5))]))
            continue
        unseen = [row.bucket for row in rows if not row.items]
        alike += [f"{row.title} {row.bucket}{f', none {listed(unseen)}' if unseen else ''}" for row in seen]
    lines: list[Block] = [Line(f"All questions have {'; '.join(alike)}.", "quiet after")] if alike else []
    split = Section("", "Accuracy by condition", [Box("split", boxes)])
    return [*lines, Box("screen-only", [split])] if boxes else lines


def _condition(row: ConditionRow) -> tuple[Words, ...]:
    if not row.items:
        return (Cell(row.bucket, "quiet"), "no items", "", "", "")
    shares = (summary.share(right, row.items) for right in (row.reference_right, row.candidate_right))
    return (row.bucket, str(row.items), *shares, str(row.candidate_unparsed))


def _shown(flips: Sequence[Flip]) -> list[Flip]:
    """At most `FLIPS_SHOWN` in their given order, taken in turn from each direction and group so that all are represented."""
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, flip in enumerate(flips):
        kinds[flip.direction, flip.group].append(index)
    turns = sorted((turn, index) for indices in kinds.values() for turn, index in enumerate(indices))
    return [flips[index] for index in sorted(index for _, index in turns[:FLIPS_SHOWN])]


def _flips(suite: SuiteResult) -> list[Block]:
    if not suite.flips:
        return []
    flips = _shown(suite.flips)
    about = (
        f"{summary.suite_line(suite).differences}. The reference's answer is on the left, the candidate's on the right."
    )
    if left := len(suite.flips) - len(flips):
        about += (
            f" {len(flips):,} of {len(suite.flips):,} are shown here, balanced over direction and group; the other {left:,} are in "
            "report.json and records.jsonl."
        )
    entries = Entries("Flipped questions", list(map(_flip, flips)), ("direction", "group"))
    return [Box("screen-only", [Section("", "Questions that flipped", [Line(about, "quiet"), entries])])]


def _flip(flip: Flip) -> Entry:
    parsed = [
        "unparsed" if answer is None else one_line(answer, 12)
        for answer in (flip.reference_parsed, flip.candidate_parsed)
    ]
    arrow = "↓" if flip.direction == "lost" else "↑"
    return Entry(
        status=Cell(f"{arrow} {flip.direction}", flip.direction),
        name=one_line(flip.item, 80),
        about=(
            "expected ", Cell(one_line(flip.expected, 12), "strong"), ", reference ", Cell(parsed[0], "strong"),
            ", candidate ", Cell(parsed[1], "strong"),
        ),
        where=" · ".join(filter(None, [one_line(flip.group, 40), _cached(flip.candidate_cached_tokens)])),
        texts=(("Reference", flip.reference_text, ""), ("Candidate", flip.candidate_text, ""), ("Prompt", flip.prompt, "")),
        kinds=(flip.direction, flip.group),
    )  # fmt: skip


def _cached(tokens: int | None) -> str:
    return "cached tokens unknown" if tokens is None else counted(tokens, "cached token")


def _split_divergence(divergence: DivergenceRow) -> tuple[str, str, str]:
    """Both texts, split at the first word that differs: what they share, and the rest of the reference's and the candidate's.

    A `DivergenceRow` has the index of the first differing token but not the tokens' texts, so the split is found by
    characters, and moved back to the start of its word.
    """
    reference, candidate = visible(divergence.reference_text), visible(divergence.candidate_text)
    shorter = min(len(reference), len(candidate))
    at = next((i for i in range(shorter) if reference[i] != candidate[i]), shorter)
    while at > 0 and not reference[at - 1].isspace():
        at -= 1
    return clip(reference[:at], TEXT_SHOWN), clip(reference[at:], TEXT_SHOWN), clip(candidate[at:], TEXT_SHOWN)


def _divergences(suite: SuiteResult) -> list[Block]:
    if not suite.divergences:
        return []
    shown = suite.divergences[:_DIVERGENCES]
    about = (
        "A tie: the log-odds of the two tokens change by no more than between two runs of the reference; close: within the limit "
        "of the declared noise, and each role's token is among the other's best five; apart: neither, or a log-probability is not "
        "finite. The text after the first difference is marked."
    )
    if len(shown) < len(suite.divergences):
        about += f" {len(shown)} of {len(suite.divergences):,} are shown here; all are in report.json."
    entries = Entries("Greedy texts that differ", list(map(_divergence, shown)))
    return [Box("screen-only", [Section("", "Greedy texts that differ", [Line(about, "quiet"), entries])])]


def _divergence(row: DivergenceRow) -> Entry:
    common, reference, candidate = _split_divergence(row)
    change: tuple[str | Cell, ...] = ()
    if row.swing is not None:
        change = (", log-odds change by ", Cell(summary.number(row.swing), "strong"), " nats")
    elif row.gap is not None:
        change = (", gap ", Cell(summary.number(row.gap), "strong"), " nats")
    ends = "(ends here)"
    return Entry(
        status=Cell(row.kind, row.kind),
        name=one_line(row.item, 80),
        about=("first differs at token ", Cell(str(row.position), "strong"), *change),
        where=_cached(row.candidate_cached_tokens),
        texts=(
            ("Reference", common, reference or ends),
            ("Candidate", common, candidate or ends),
            ("Prompt", row.prompt, ""),
        ),
    )


def _logits(rows: Sequence[LogitsRow]) -> list[Block]:
    if not rows:
        return []
    columns = (
        "Condition", "Positions", "Mean KL", "Floor", "Median", "99 %", "99.9 %", "Max", "Same top token", "Not finite",
    )  # fmt: skip
    note = (
        "KL(reference ‖ candidate) of the next-token distributions on the reference’s own tokens, in nats. The floor is the "
        f"reference against itself. {' '.join(summary.compared_tokens(rows))}"
    )
    table = Table(columns, list(map(_logits_row, rows)), note=note, numbers=range(1, 10), style="logits")
    return [Box("screen-only", [Section("", "Logits", [table])])]


def _logits_row(row: LogitsRow) -> tuple[Words, ...]:
    number = summary.number
    return (
        row.condition,
        Cell(f"{row.positions:,}", note=f"{row.sequences:,} sequences"),
        Cell(number(row.mean_kl), "strong"),
        "not measured" if row.floor_mean_kl is None else number(row.floor_mean_kl),
        *map(number, (row.median, row.p99, row.p999)),
        Cell(number(row.max), note=one_line(row.max_at, 60)),
        number(row.same_top),
        Cell(f"{row.nonfinite:,}", "beyond" if row.nonfinite else ""),
    )


def _envelope(report: Report) -> list[Block]:
    if report.envelope is None:
        return []
    *covered, uncovered = envelope_lines(report.envelope)
    needed = {True: ", but needed", False: ""}
    rows = [
        (row.phase, row.title, row.label, f"{row.calls:,}{needed[row.wanted and not row.calls]}")
        for row in report.envelope.rows
    ]
    table = Table(("Phase", "Condition", "Bucket", "Compared calls"), rows, numbers=(3,), style="envelope")
    fold = Fold("Compared calls by condition", [Line("Those of the layer that has the fewest.", "quiet"), table])
    blocks: list[Block] = [*map(Line, covered), Line(uncovered, "quiet after"), fold]
    return [Section("envelope", "What this verdict covers", blocks, short="Covers")]


def _checks(report: Report) -> Section:
    met, unmet = [check for check in report.checks if check.status == "ok"], summary.unmet(report)
    blocks: list[Block] = [Checks(unmet)] if unmet else []
    blocks += [Fold(f"{len(met)} {'check is' if len(met) == 1 else 'checks are'} ok", [Checks(met)])] if met else []
    return Section("checks", "Checks", blocks or [Line("Nothing was checked.", "empty")])


def _calls(report: Report) -> Section:
    pair: list[Block] = []
    for role, server in (("reference", report.reference), ("candidate", report.candidate)):
        ready = "" if server.startup_s is None else f"; ready after {server.startup_s:.1f} s"
        claims = f"{server.backend}. Claims {', '.join(server.claimed_phases) or 'no phase'}{ready}."
        pair += calls_blocks(role, server.calls, claims)
    inside: list[Block] = [Box("pair", pair)]
    if report.kernels:
        about = "In one traced pass of each kind: proof that a backend's own kernels ran, and the other role's did not."
        inside.append(Section("", "Kernels that ran", [Line(about, "quiet"), *map(_kernels, report.kernels)]))
    fold = Fold(f"By role, phase and kernel{', and the kernels that ran' if report.kernels else ''}", inside)
    return Section("calls", "Attention calls counted", [fold], short="Calls")


def _kernels(traced: PassKernels) -> Fold:
    attention = {None: "not known", True: "yes", False: "no"}
    rows = [
        (Cell(kernel.name, code=True), kernel.kind, f"{kernel.launches:,}", attention[kernel.attention], kernel.of)
        for kernel in traced.kernels
    ]
    columns = ("Kernel", "Kind", "Launches", "Attention", "Of")
    return Fold(traced_kernels(traced), [Table(columns, rows, numbers=(2,), style="kernels")])


def _environment(report: Report) -> Section:
    environment = report.environment
    rows = [
        tuple(Cell(text, code=True) for text in (name, *values))
        for name, values in environment.argument_differences.items()
    ]
    title = "Server arguments that differ besides the backend"
    differ = Table(("Argument", "Reference", "Candidate"), rows, title)
    none = Line("The servers' arguments differ in nothing but the backend.", "quiet")
    names = ("device", "hardware", "python", "git", "model", "model_hash")
    facts = [(name.replace("_", " ").capitalize(), getattr(environment, name) or summary.NOTHING) for name in names]
    launched = [
        Code(server.launch_command, f"Launch command of the {role}")
        for role, server in (("reference", report.reference), ("candidate", report.candidate))
        if server.launch_command
    ]
    inside: list[Block] = [Facts([*facts, *environment.packages.items()], "small"), *launched]
    fold = Fold("Hardware, model, versions, and how the servers were launched", inside)
    return Section("environment", "Environment", [differ if rows else none, fold])


def _comment(report: Report) -> list[Block]:
    """For a pull request, within `_COMMENT_LINES`: the picture of the cause says more than a further finding."""
    most = 2 if report.latency is None else 1
    made = [_comment_with(report, count, drawn) for drawn in (True, False) for count in range(most, -1, -1)]
    return next((blocks for blocks in made if len(markdown_lines(blocks)) <= _COMMENT_LINES - 6), made[-1])


def _comment_with(report: Report, further: int, drawn: bool) -> list[Block]:
    cause = summary.main_finding(report)
    said = cause.sentence if cause else ""
    blocks: list[Block] = []
    if cause:
        blocks += [Line("Cause", "strong"), Findings([cause], brief=True)]
        blocks += [Weights(cause.picture)] if cause.picture and drawn else []
    blocks.append(Items([one_line(reason, 300) for reason in report.reasons if reason != said], most=5))
    if log := summary.failure_lines(report, _COMMENT_LOG):
        blocks.append(Fold("Its log", [Code("\n".join(line[:_LOG] for line in log))]))
    blocks += _comment_suites(report)
    blocks.append(Fold("Checks, layers, and what the verdict covers", _comment_fold(report, cause, further)))
    if report.reproduce:
        long = visible(report.reproduce).count("\n") >= _COMMAND_LINES or len(report.reproduce) > _COMMAND
        shown = Line("The command that repeats this run is in report.html.")
        blocks.append(shown if long else Code(report.reproduce, "Repeat this run", "sh"))
    return blocks


def _comment_suites(report: Report) -> list[Block]:
    if not report.suites:
        return []
    table = _suite_table(report.suites)
    bounds = (
        f"{line.bound}{f', set by {line.policy}' * bool(line.policy)}"
        for line in map(summary.suite_line, report.suites)
    )
    rows = [(*row[:-1], one_line(bound)) for row, bound in zip(table.rows, bounds, strict=True)]
    return [replace(table, rows=rows, most=7)]


def _comment_fold(report: Report, cause: Finding | None, further: int) -> list[Block]:
    inside: list[Block] = []
    if unmet := summary.unmet(report):
        inside += [Line("Checks that are not ok", "strong"), Checks(unmet, most=5)]
    if others := [finding for finding in report.findings if finding is not cause]:
        inside += [Line("Further findings", "strong"), Findings(others, most=further)]
    if lines := [one_line(line, 400) for line in _layer_diff(report)]:
        inside += [Line("Layer diff", "strong"), Items(lines, most=3)]
    for title, lines, most in (("Envelope", envelope_lines(report.envelope), 800), ("Latency", _latency(report), 400)):
        if lines:
            words = " ".join(one_line(line, most) for line in lines)
            inside.append(Line((Cell(title, "strong"), f": {words}")))
    return inside


def _cases(report: Report) -> list[Suite]:
    """A suite with the verdict and the checks, and one per suite of the run."""
    prefix = f"assay.{_name(report.candidate.backend)}"
    verdict = CaseResult("verdict", prefix, report.verdict, report.headline, _why(report), report.seconds)
    cases = [verdict, *(CaseResult.of(check, f"{prefix}.checks") for check in report.checks)]
    candidate, environment = report.candidate, report.environment
    properties = {
        "verdict": report.verdict, "exit_code": str(report.exit_code), "run_id": report.run_id,
        "reference": report.reference.backend, "candidate": candidate.backend, "engine": candidate.engine,
        "device": environment.device, "model": environment.model, "model_hash": environment.model_hash,
        "reproduce": report.reproduce,
    }  # fmt: skip
    ended_early = report.failure is not None
    suites = (_suite_case(suite, f"{prefix}.{_name(suite.id)}", ended_early) for suite in report.suites)
    return [Suite("assay", cases, properties, report.created), *suites]


def _suite_case(suite: SuiteResult, classname: str, ended_early: bool) -> Suite:
    properties = {"synthetic": str(suite.synthetic).lower()}
    for metric in suite.metrics:
        properties[metric.id] = metric.text
        if metric.bound is not None:
            properties[f"bound of {metric.id}"] = summary.bound_and_policy(metric)
    line = summary.suite_line(suite)
    output = [
        f"{line.suite}: {suite.why}",
        *([f"accuracy: reference {line.reference}, candidate {line.candidate}"] if suite.tallies else []),
        f"differences: {line.differences}",
        *(
            f"{row.id} ({row.title} {row.bucket}): reference {row.reference_right}/{row.items}, "
            f"candidate {row.candidate_right}/{row.items}, unparsed {row.candidate_unparsed}"
            for row in suite.conditions
            if row.items
        ),
    ]
    case = CaseResult("verdict", classname, suite.verdict, f"{line.suite}: {suite.why}", output)
    if ended_early and suite.verdict != "pass":  # one cause is one error: that of the run
        case = replace(case, outcome="not checked", message=f"the run ended early; {suite.why}", lines=())
    return Suite(suite.id, [case], properties)


def _why(report: Report) -> list[str]:
    lines = list(report.reasons)
    if report.failure and report.failure.details:
        lines += ["", report.failure.details]
    for finding in report.findings:
        lines += ["", f"{finding.severity}: {finding.id}: {finding.sentence}", *finding_lines(finding)[1:]]
        lines += [f"  to reproduce: {finding.reproduce}"] if finding.reproduce else []
    if report.layers:
        lines += ["", *summary.layer_diff_lines(report.layers)]
    if report.latency:
        lines += ["", *summary.latency_lines(report.latency)]
    return [*lines, "", f"to repeat this run: {report.reproduce}"]


def _name(text: str) -> str:
    """`text` as one part of a class name: CI systems split them at dots, so a URL or a `module:function` must not add any."""
    return re.sub(r"[^\w-]+", "_", one_line(text, 100)) or "_"
