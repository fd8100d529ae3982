"""The section of a suite on a run's page: its metrics, answers by condition, and differing questions and texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from assay.harness.judge.report import ConditionRow, DivergenceRow, Flip, LogitsRow, Metric, SuiteResult
from assay.harness.text import clip, counted, listed, one_line, visible
from assay.reports import summary
from assay.reports.document import Block, Cell, Drawing, Entries, Entry, Line, Section, Table, Words, first_words
from assay.reports.page import TEXT_SHOWN
from assay.reports.svg import interval_chart
from assay.reports.wording.say import measured_of, say
from assay.reports.wording.verdict import suite_title

_FLIPS_SHOWN = 256
"""Most flips to embed for a suite; with texts cut at `TEXT_SHOWN` the page stays below a few megabytes."""
_DIVERGENCES = 60


def suite_section(number: int, suite: SuiteResult, detail: bool) -> Section:
    """Build the section of a suite: the reasons for its verdict, and folded below, its numbers and answers, for a page.

    Args:
        number: the suite's number, for its anchor.
        detail: whether only a page shows the section.
    """
    badge: list[str | Cell] = [" ", Cell("synthetic questions", "badge")] if suite.synthetic else []
    title, sign = suite_title(suite), Cell(suite.verdict, suite.verdict, sign=suite.verdict)
    blocks: list[Block] = [Section("", list(map(_metric, suite.metrics)), style="cards")] if suite.metrics else []
    blocks += [*_answers(suite), *_conditions(suite), *_flips(suite), *_logits(suite.logits), *_divergences(suite)]
    return Section(
        (sign, f" {title}", *badge), [Section("", blocks, detail=True)], f"suite-{number}", detail=detail, folded=True,
        lead=say(*suite.why), short=one_line(title, 40), sign=suite.verdict, style="suite",
    )  # fmt: skip


def _metric(metric: Metric) -> Section:
    said = measured_of(metric)
    limits = [f"Interval {summary.interval(metric)}."] if metric.low is not None else []
    limits += [f"Bound {summary.bound_and_policy(metric)}."] if metric.bound is not None else []
    says = f"{one_line(said.title)}: {summary.number(metric.value)}, interval {summary.interval(metric)}"
    says += f", bound {summary.bound(metric)}" if metric.bound is not None else ""
    chart = interval_chart(says, metric.value, metric.low, metric.high, metric.bound)
    blocks: list[Block] = [Line(said.text, "value"), Drawing(chart)]
    blocks += [Line(" ".join(limits), "quiet")] if limits else []
    blocks += [Line(said.explain, "quiet")] if said.explain else []
    return Section(said.title, blocks, style="card")


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
    return [Section("Answers", [Table(columns, rows, note=note, numbers=range(1, 7))])]


def _conditions(suite: SuiteResult) -> list[Block]:
    """Tabulate answers by each condition that differs between questions; say in a line which conditions all share."""
    alike: list[str] = []
    tables: list[Block] = []
    for _, group in groupby(suite.conditions, key=lambda row: row.by):
        rows = tuple(group)
        seen = [row for row in rows if row.items]
        if len(seen) > 1:
            columns = (rows[0].title, "Items", "Reference", "Candidate", "Unparsed")
            tables.append(Table(columns, list(map(_condition, rows)), numbers=range(1, 5)))
            continue
        unseen = [row.bucket for row in rows if not row.items]
        alike += [f"{row.title} {row.bucket}{f', none {listed(unseen)}' if unseen else ''}" for row in seen]
    lines: list[Block] = [Line(f"All questions have {'; '.join(alike)}.", "quiet after")] if alike else []
    split = Section("", tables, style="split")
    return [*lines, Section("Accuracy by condition", [split], style="screen-only")] if tables else lines


def _condition(row: ConditionRow) -> tuple[Words, ...]:
    if not row.items:
        return (Cell(row.bucket, "quiet"), "no items", "", "", "")
    shares = (summary.share(right, row.items) for right in (row.reference_right, row.candidate_right))
    return (row.bucket, str(row.items), *shares, str(row.candidate_unparsed))


def _shown(flips: Sequence[Flip]) -> list[Flip]:
    """Return at most `_FLIPS_SHOWN`, taken in turn from each direction and group so that all are represented."""
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, flip in enumerate(flips):
        kinds[flip.direction, flip.group].append(index)
    turns = sorted((turn, index) for indices in kinds.values() for turn, index in enumerate(indices))
    return [flips[index] for index in sorted(index for _, index in turns[:_FLIPS_SHOWN])]


def _flips(suite: SuiteResult) -> list[Block]:
    if not suite.flips and not suite.steady:
        return []
    flips = _shown(suite.flips)
    both = f", and the first {len(suite.steady):,} that both got right or wrong" if suite.steady else ""
    about = f"{summary.differences(suite)}{both}. The reference's answer is on the left, the candidate's on the right."
    if left := len(suite.flips) - len(flips):
        about += (
            f" {len(flips):,} of {len(suite.flips):,} are shown here, balanced over direction and group; the other {left:,} are in "
            "report.json and records.jsonl."
        )
    shown = [*flips, *suite.steady]
    entries = Entries(
        "Questions and answers",
        [_flip(flip, begins) for flip, begins in zip(shown, first_words([flip.prompt for flip in shown]), strict=True)],
        ("direction", "group"),
    )
    return [Section("Questions and answers", [Line(about, "quiet"), entries], style="screen-only")]


def _flip(flip: Flip, begins: str) -> Entry:
    parsed = [
        "unparsed" if answer is None else one_line(answer, 12)
        for answer in (flip.reference_parsed, flip.candidate_parsed)
    ]
    arrow = {"lost": "↓ ", "gained": "↑ "}.get(flip.direction, "")
    return Entry(
        status=Cell(f"{arrow}{flip.direction}", flip.direction.removeprefix("both ")),
        name=one_line(begins, 90) or one_line(flip.item, 80),
        about=(
            "expected ", Cell(one_line(flip.expected, 12), "strong"), ", reference ", Cell(parsed[0], "strong"),
            ", candidate ", Cell(parsed[1], "strong"),
        ),
        where=" · ".join(filter(None, map(one_line, (flip.group, flip.item, _cached(flip.candidate_cached_tokens)), (40, 40, 40)))),
        texts=(("Reference", flip.reference_text, ""), ("Candidate", flip.candidate_text, ""), ("Prompt", flip.prompt, "")),
        kinds=(flip.direction, flip.group),
    )  # fmt: skip


def _cached(tokens: int | None) -> str:
    return "cached tokens unknown" if tokens is None else counted(tokens, "cached token")


def _split_divergence(divergence: DivergenceRow) -> tuple[str, str, str]:
    """Split both texts at the first word that differs: the shared part, and the rest of the reference's and the candidate's.

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
        "of the declared noise, and each role's token is among the other's best alternatives; apart: neither, or a log-probability "
        "is not finite. The text after the first difference is marked."
    )
    if len(shown) < len(suite.divergences):
        about += f" {len(shown)} of {len(suite.divergences):,} are shown here; all are in report.json."
    entries = Entries("Greedy texts that differ", list(map(_divergence, shown)))
    return [Section("Greedy texts that differ", [Line(about, "quiet"), entries], style="screen-only")]


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
    return [Section("Logits", [table], style="screen-only")]


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
