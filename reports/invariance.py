"""The document of ``assay invariance``: the sets of features that break, the variants, and every two features that were on."""

from __future__ import annotations

from assay.harness.judge.invariance_result import ArmRow, FeatureRow, InvarianceResult, PairCell
from assay.harness.progress import duration
from assay.harness.text import counted, one_line
from assay.harness.verdict import WORST_FIRST, Verdict
from assay.reports.document import (
    Block,
    CaseResult,
    Cell,
    Document,
    Facts,
    Findings,
    Line,
    Section,
    Suite,
    Table,
    Words,
    checks_blocks,
)
from assay.reports.summary import NOTHING
from assay.reports.wording.invariance import NO_ARM, clauses
from assay.reports.wording.verdict import headline
from assay.reports.wording.written import worded_json

_ARMS = ("variant", "features", "prefill KL", "worst", "decode KL", "worst", "server", "seconds", "verdict")


def invariance_document(result: InvarianceResult) -> Document:
    """Build the document: verdict, findings, variants, features and pairs."""
    return Document(
        command="invariance",
        title=f"features of {one_line(result.backend, 60)} that should not affect outputs",
        verdict=result.verdict,
        headline=headline(result),
        created=result.created,
        crumbs=[
            f"{counted(len(result.arms), 'variant')}, {counted(result.servers, 'server')}, {duration(result.seconds)}"
        ],
        body=_body(result),
        foot=f"{result.schema_id}. Next to this file: invariance.json, the complete result, and arms/, the answers.",
        suites=[_suite(result)],
        result=result,
        json=worded_json,
    )


def _says(result: InvarianceResult) -> str:
    return (
        f"Each variant scored the same {counted(result.probes, 'probe')}, token by token, and wrote the same tokens. The base "
        f"differs from itself in other batches by a mean KL of {result.floor_kl:.2g} nats; up to {result.bound_kl:.2g} is noise."
    )


def _body(result: InvarianceResult) -> list[Block]:
    blocks: list[Block] = [
        Facts(
            [
                ("backend", Cell(result.backend, code=True)),
                ("model", Cell(result.model, code=True)),
                ("device", result.device),
            ]
        ),
        Section("Findings", [Findings(result.findings)] if result.findings else [], "findings"),
        Section("Variants", [Line(_says(result), "quiet"), _arms(result)], "arms"),
        Section("Features", _features(result.features), "features"),
        Section("Pairs", [_matrix(result), *_left_out(result)], "pairs", detail=True),
        Section("Requirements of a pass", checks_blocks(result.checks), "checks"),
    ]
    facts: list[tuple[Words, ...]] = [
        ("Hardware", result.hardware),
        ("Git", result.git or NOTHING),
        ("Dtype", result.dtype),
    ]
    return [
        *blocks,
        Section("Environment", [Facts([*facts, *result.packages.items()], "small")], "environment", detail=True),
    ]


def _arms(result: InvarianceResult) -> Table:
    return Table(_ARMS, [_arm(arm) for arm in result.arms], numbers=(2, 3, 4, 5, 6, 7), style="stacked")


def _arm(arm: ArmRow) -> tuple[Words, ...]:
    started = f"{arm.server} (started in {arm.startup_s:.0f} s)" if arm.startup_s else f"{arm.server}"
    return (
        f"{arm.number}",
        " + ".join(arm.features) or arm.chosen_by,
        *(_nats(value) for value in (arm.prefill_kl, arm.prefill_worst, arm.decode_kl, arm.decode_worst)),
        started,
        f"{arm.seconds:.0f}",
        Cell(arm.verdict, arm.verdict, note=one_line(clauses(arm.why), 160)),
    )


def _nats(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def _features(rows: tuple[FeatureRow, ...]) -> list[Block]:
    """Tabulate the features that were on, and folded below them those that were not."""
    on, off = ([row for row in rows if bool(row.seen) == seen] for seen in (True, False))
    tables = [
        Table(
            ("feature", "effect", "variants", "shown by"),
            [
                (row.id, row.title, f"{row.arms}", row.seen or f"not covered: {row.not_covered or NO_ARM}")
                for row in some
            ],
            numbers=(2,),
        )
        for some in (on, off)
    ]
    fold = Section(f"{counted(len(off), 'feature')} not covered", [tables[1]], folded=True)
    return [*([tables[0]] if on else []), *([fold] if off else [])]


def _matrix(result: InvarianceResult) -> Table:
    """Show every feature by every other; the diagonal shows each in any variant."""
    names = list(dict.fromkeys(cell.first for cell in result.pairs))
    cells = {frozenset((cell.first, cell.other)): cell for cell in result.pairs}
    rows: list[list[Words]] = [[row, *(_pair(cells[frozenset((row, column))]) for column in names)] for row in names]
    return Table(("on together", *names), rows, style="matrix")


def _left_out(result: InvarianceResult) -> list[Block]:
    """Name the pairs that the budget left out, if any."""
    pairs = ", ".join(" + ".join(pair) for pair in result.left_out)
    return [Line(f"Not together in any variant that decided: {pairs}.", "quiet")] if pairs else []


def _pair(cell: PairCell) -> Cell:
    return Cell("") if cell.verdict is None else Cell(_nats(cell.kl), cell.verdict)


def _suite(result: InvarianceResult) -> Suite:
    cases = [
        CaseResult(
            " + ".join(arm.features) or arm.chosen_by, "assay.invariance.arms", arm.verdict, clauses(arm.why) or arm.verdict,
            [f"{name}: {shows}" for name, shows in arm.seen.items()], arm.seconds,
        )
        for arm in sorted(result.arms, key=lambda arm: (_order(arm.verdict), arm.number))
    ]  # fmt: skip
    checks = [CaseResult.of(check, "assay.invariance.checks") for check in result.checks]
    return Suite(
        "assay invariance", [*checks, *cases], {"backend": result.backend, "model": result.model}, result.created
    )


def _order(verdict: Verdict) -> int:
    return WORST_FIRST.index(verdict)
