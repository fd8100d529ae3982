"""The document of ``assay invariance``: the sets of features that break, the variants, and every two features that were on."""

from __future__ import annotations

from assay.harness.judge.invariance_result import ArmRow, InvarianceResult
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
        foot=f"{result.schema_id}. Next to this file: invariance.json, the complete result, and probes/, the answers.",
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
        Section("Features", _features(result), "features"),
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


def _features(result: InvarianceResult) -> list[Block]:
    """Tabulate the features that were on, and folded below them those that cannot be."""
    rows: list[tuple[Words, ...]] = []
    for id_, title in result.features.items():
        shown = [arm.seen[id_] for arm in result.arms if id_ in arm.seen]
        rows.append((id_, title, f"{len(shown)}", shown[0] if shown else NO_ARM))
    blocks: list[Block] = [Table(("feature", "effect", "variants", "shown by"), rows, numbers=(2,))]
    if not result.not_covered:
        return blocks
    lacking = Table(("feature", "cannot be switched here"), [*result.not_covered.items()])
    return [*blocks, Section(f"{counted(len(result.not_covered), 'feature')} not covered", [lacking], folded=True)]


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
