"""The documents of ``assay fingerprint``: one fingerprint, and the differences between two."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.evidence.fingerprint import PARTS, Fingerprint, Resolved
from assay.harness.fingerprint.differences import FingerprintDiff
from assay.harness.fingerprint.parts import JUDGED, Difference, faults
from assay.harness.text import counted, few, listed, one_line
from assay.reports.document import (
    MORE,
    Block,
    CaseResult,
    Cell,
    Document,
    Facts,
    Items,
    Row,
    Section,
    Suite,
    Table,
    Words,
)

# Rows of a table that a terminal and Markdown show.
_SHOWN = 40
# Rows of one label on the first screen.
_MOST = 3


def fingerprint_document(made: Fingerprint) -> Document:
    """Build the document of a fingerprint: each part, parts that are wrong in themselves, and parts that were not observed."""
    wrong = [fault for fault in faults(made) if fault.outputs]
    beware = [fault for fault in faults(made) if not fault.outputs]
    body: list[Block] = [Facts([("model", made.model), ("observed in", made.source), ("engine", made.engine)])]
    if wrong:
        body.append(Section("Wrong in itself", [Items([_line(fault) for fault in wrong])], "wrong"))
    if beware:
        body.append(Section("Good to know", [Items([_line(fault) for fault in beware])], "beware"))
    body.append(Table(("part", "observed", "seconds"), [_row(made, part) for part in PARTS], numbers=(2,)))
    for name, title in (("arguments", "Resolved arguments"), ("environment", "Environment"), ("packages", "Packages")):
        values = getattr(made, name)
        if values:
            rows = [(key, one_line(value, 120)) for key, value in values.items()]
            body.append(Section(title, [Table(("name", "value"), rows)], name, detail=True))
    if made.backends:
        body.append(Section("Resolved implementations", [_backends(made.backends)], "backends"))
    seen = sum(made.has(part) for part in PARTS)
    headline = f"{seen} of {counted(len(PARTS), 'part')} observed of {made.model}, {made.engine}"
    return Document(
        command="fingerprint",
        title=made.model,
        verdict=None,
        exit_code=1 if wrong else 0,
        headline=f"{wrong[0].says}." if wrong else f"{headline}; {_nothing_wrong(made)}.",
        screen=_screen(made, wrong, beware),
        body=body,
        suites=[Suite("fingerprint", [_case(fault) for fault in wrong])],
        result=made,
    )


def _screen(made: Fingerprint, wrong: Sequence[Difference], beware: Sequence[Difference]) -> list[Row]:
    """Return the rows: faults first, then each part that was observed, and the names of the others."""
    unseen = [part for part in PARTS if not made.has(part)]
    return [
        *_differences("Also wrong", wrong[1:]),
        *_differences("To be known", beware),
        Row("Observed in", f"{made.source}, {made.engine}"),
        *(Row(part, one_line(_observed(made, part), 110)) for part in PARTS if made.has(part)),
        *([Row("Not observed", listed(unseen))] if unseen else []),
        MORE,
    ]


def _differences(label: str, some: Sequence[Difference]) -> list[Row]:
    """Return a row for each of the first differences, and the number of the others."""
    rows = [Row(label * (not n), one_line(each.says, 160)) for n, each in enumerate(some[:_MOST])]
    return rows + ([Row("", f"and {len(some) - _MOST} more")] if len(some) > _MOST else [])


def _nothing_wrong(made: Fingerprint) -> str:
    unseen = [part for part in JUDGED if not made.has(part)]
    if not unseen:
        return "nothing is wrong in itself"
    verb = "was" if unseen == ["rope"] else "were"
    return f"no observed part is wrong in itself; {listed(unseen)} {verb} not observed"


def _row(made: Fingerprint, part: str) -> tuple[str | Cell, ...]:
    seconds = made.seconds.get(part)
    shown = (
        _observed(made, part) if made.has(part) else Cell(f"not observed: {made.not_observed.get(part, '')}", "quiet")
    )
    return part, shown, "" if seconds is None else f"{seconds:.2f}"


def _observed(made: Fingerprint, part: str) -> str:
    value = getattr(made, part)
    if part == "tokens":
        number = len(value.texts) + len(value.chats)
        bos = "no BOS" if value.bos is None else f"BOS {value.bos}"
        return f"{counted(number, 'text')} and chats; {value.tokenizer or 'ids'}; {bos}; EOS {list(value.eos)}"
    if part == "rope":
        tables = [f"{table.kind}, {2 * len(table.frequencies)} dims, {table.dtype}" for table in value]
        return "; ".join(dict.fromkeys(tables)) or "none"
    if part == "weights":
        dtypes = sorted({weight.dtype for weight in value})
        return f"{counted(len(value), 'parameter')}: {', '.join(dtypes)}"
    if part == "positions":
        return f"{list(value[:6])}"
    if part == "ignored":
        return "; ".join(value) or "nothing"
    if isinstance(value, dict) and len(value) <= 6:
        return one_line("; ".join(f"{name} {text}" for name, text in value.items()) or "none", 160)
    return counted(len(value), "entry").replace("entrys", "entries")


def _backends(resolved: Sequence[Resolved]) -> Table:
    rows = [(row.operation, row.phase or "any", row.layers or "none", row.runs) for row in resolved]
    return Table(("operation", "phase", "layers", "runs"), rows, most=_SHOWN)


def diff_document(result: FingerprintDiff) -> Document:
    """Build the document of a diff: undeclared differences that change outputs come first."""
    counting = result.undeclared
    declared = [difference for difference in result.differences if difference.declared]
    other = [difference for difference in result.differences if not difference.counts and not difference.declared]
    body: list[Block] = [Facts([("A", result.left), ("B", result.right)])]
    if result.treatment:
        rows = [(name, ours or "not set", theirs or "not set") for name, (ours, theirs) in result.treatment.items()]
        body.append(Table(("asked to differ", "A", "B"), rows))
    for id_, title, group in (
        ("differences", "Changes outputs, and nothing declares it", counting),
        ("declared", "Declared", declared),
        ("other", "Not known to change outputs", other),
    ):
        if group:
            lines: list[Words] = [
                line
                for difference in group
                for line in (_line(difference), *_details(difference, id_ == "differences"))
            ]
            body.append(Section(title, [Items(lines, most=_SHOWN)], id_))
    if result.shared:
        body.append(Section("Wrong in both in the same way", [Items(list(result.shared))], "shared"))
    if result.not_compared:
        table = Table(("part", "why"), list(result.not_compared.items()))
        body.append(Section("Not compared", [table], "not-compared"))
    if counting:
        headline = f"{counting[0].says}" + (f"; and {len(counting) - 1} more" if len(counting) > 1 else "") + "."
    elif result.compared:
        but = " except for declared differences" if any(difference.outputs for difference in declared) else ""
        parts = counted(len(result.compared), "part")
        were = "was" if len(result.compared) == 1 else "were"
        headline = f"Nothing that changes outputs differs{but}, in {parts} that {were} compared."
        if result.lost:
            was = "was" if len(result.lost) == 1 else "were"
            headline = f"{listed(result.lost)} {was} observed on one side only. Nothing else counts{but}, in {parts}."
        if result.unread:
            headline = (
                f"Settings of the model were not compared ({result.unread}). Nothing else counts{but}, in {parts}."
            )
    else:
        headline = "Nothing could be compared: no part was observed on both sides."
    cases = [_case(difference) for difference in result.differences if difference.outputs] or [
        CaseResult(
            "fingerprints",
            "fingerprint",
            "pass" if result.exit_code == 0 else "inconclusive",
            headline,
            [headline],
        )
    ]
    return Document(
        command="compare",
        title="fingerprints",
        verdict=None,
        exit_code=result.exit_code,
        headline=headline,
        screen=[
            Row("A", result.left),
            Row("B", result.right),
            *_differences("Also differs", counting[1:]),
            *_differences("Declared", declared),
            *_differences("Other", other),
            *([Row("Not compared", few(list(result.not_compared), 8))] if result.not_compared else []),
            MORE,
        ],
        body=body,
        suites=[Suite("fingerprint", cases)],
        result=result,
    )


def _line(difference: Difference) -> Words:
    note = f"declared by {difference.declared}" if difference.declared else ""
    return (
        Cell(difference.says, "beyond" if difference.counts else "", note=note),
        Cell(f"  [{difference.name}]", "quiet"),
    )


def _details(difference: Difference, shown: bool) -> list[Words]:
    return [f"  {line}" for line in difference.details] if shown else []


def _case(difference: Difference) -> CaseResult:
    return CaseResult(
        difference.name,
        "fingerprint",
        "failed" if difference.counts else "pass",
        difference.says,
        [difference.says, *difference.details],
    )
