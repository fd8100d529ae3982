"""The document of a certificate."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope, Examined, Look
from assay.harness.text import one_line
from assay.reports.document import Block, Cell, Document, Items, Line, Only, Section, Table, Words

_COLUMNS = ("fault", "seeded", "public bug", "caught by", "after", "named", "pinned", "crash, time-out", "s", "read")
_BRIEF = (0, 3, 4, 5, 6, 9, 8)
"""Columns that a terminal has room for."""
_NUMBERED = {"op-level": "calls", "layers": "calls", "logits": "prompts", "greedy": "prompts", "accuracy": "questions"}
_KINDS = {"fault": "Faults", "equivalent": "Equivalent faults", "honest": "Honest kernels"}


def certificate_document(certificate: Certificate) -> Document:
    """Build the document of what was caught, named and pinned, in which envelope: brief on a terminal, by kind in Markdown."""
    columns = [number for number in range(len(_COLUMNS)) if _COLUMNS[number] != "read" or certificate.envelope.read_out]
    brief = [number for number in _BRIEF if number in columns]
    sections = []
    for kind, title in _KINDS.items():
        examined = [task for task in certificate.examined if task.kind == kind]
        sections += [Section(kind, title, [_table(examined, columns)])] if examined else []
    listed = certificate.having("missed", "false alarm", "crash", "time-out", "not shown")
    body: list[Block] = [
        Only("terminal", [_table(certificate.examined, brief)]),
        Line(f"Envelope: {_envelope(certificate.envelope)}."),
        Items([f"{task.id}: {task.outcome}: {one_line(task.why)}" for task in listed]),
        Only("markdown", sections),
    ]
    return Document(
        command="certify",
        title="Certificate",
        verdict=certificate.verdict,
        headline=f"{_headline(certificate)}.",
        created=certificate.made,
        body=body,
        result=certificate,
    )


def _table(examined: Sequence[Examined], columns: Sequence[int]) -> Table:
    rows = [[row[number] for number in columns] for row in map(_row, examined)]
    return Table([_COLUMNS[number] for number in columns], rows)


def _headline(certificate: Certificate) -> str:
    """One sentence: how many faults were caught, named and pinned, and how many false alarms there were."""
    faults = [task for task in certificate.having("caught", "missed") if task.kind == "fault"]
    caught = [fault for fault in faults if fault.outcome == "caught"]
    named = [task for task in caught if task.named is not None]
    harmless = [task for task in certificate.examined if task.kind != "fault"]
    alarms = len(certificate.having("false alarm"))
    hidden = sum(fault.hidden for fault in faults)
    text = f"{len(caught)} of {len(faults)} faults caught"
    text += f", {hidden} hidden by the noise of {certificate.envelope.noise}" if hidden else ""
    text += f"; {sum(bool(task.named) for task in named)} of {len(named)} with a name named" if named else ""
    text += (
        f"; {sum(bool(task.pinned) for task in caught)} of {len(caught)} pinned; {alarms} false alarm{'s' * (alarms != 1)} on "
        f"{len(harmless)} equivalent faults and honest kernels"
    )
    unfinished = len(certificate.having("crash", "time-out"))
    outside = len(certificate.having("not shown"))
    text += f"; {outside} do not show in this envelope" if outside else ""
    text += f"; {unfinished} not examined to the end" if unfinished else ""
    text += f"; {len(certificate.left)} not examined" if certificate.left else ""
    text += f"; {len(certificate.not_asked)} of the catalogue left out" if certificate.not_asked else ""
    return f"{text}; {certificate.minutes:.1f} minutes"


def _envelope(envelope: CertifiedEnvelope) -> str:
    """Where the certificate was made, in words."""
    parts = [
        f"faults in {envelope.candidate}" if envelope.candidate else "",
        f"{' and '.join(envelope.phases)} only" if len(envelope.phases) == 1 else "",
        f"noise family {envelope.noise}" if envelope.noise else "",
        f"{envelope.calls} calls of the op-level matrix" if envelope.level == "op" else envelope.engine,
        f"{envelope.reference} as reference" if envelope.reference else "",
        envelope.machine or envelope.device,
        envelope.model,
        " and ".join(envelope.dtypes),
        f"{envelope.layers} layers of {envelope.heads} heads",
        f"to {envelope.most_new} new tokens, {envelope.longest} tokens and {envelope.largest_batch} sequences in a call",
        f"PyTorch {envelope.torch}",
        f"seed {envelope.seed}",
        f"assay {envelope.version} ({envelope.source})" if envelope.version else "",
    ]
    return ", ".join(part for part in parts if part)


def _row(examined: Examined) -> tuple[Words, ...]:
    by = [look for look in examined.looks if look.caught]
    unfinished = examined.outcome in ("crash", "time-out")
    no_name = (
        ""
        if not by or examined.kind != "fault"
        else "no name"
        if any(look.suite == "op-level" for look in by)
        else "not measured"
    )
    shown = ", ".join(look.suite for look in by) or ("" if unfinished else examined.outcome)
    return (
        examined.id, examined.restricted or "everywhere", _reports(examined) if examined.kind == "fault" else "",
        shown if examined.outcome != "false alarm" else f"FALSE ALARM: {shown}",
        ", ".join(_after(look) for look in by), _yes(examined.named, no_name), _yes(examined.pinned, ""),
        f"{examined.outcome}: {one_line(examined.why)}" if unfinished else "", f"{examined.seconds:.1f}", _read(examined),
    )  # fmt: skip


def _read(examined: Examined) -> str:
    """Return what was read off the kernel; empty if it was not read."""
    if examined.read is None:
        return ""
    return f"{one_line(examined.read) or 'nothing'}{'' if examined.read_exact or not examined.read else ' (not exact)'}"


def _reports(examined: Examined) -> Words:
    names = [Cell(_name(link), link=link) for link in examined.links]
    return tuple(part for name in names for part in (", ", name))[1:] or "no public bug known"


def _name(link: str) -> str:
    """The short name of a report: repository and number, as in ``sglang#12``."""
    *_, repository, _, number = link.split("/")
    return f"{repository}#{number}"


def _after(look: Look) -> str:
    counted = _NUMBERED.get(look.suite, "calls")
    return f"{look.after} of {look.of} {counted}" if look.after else f"{look.of} {counted}"


def _yes(value: bool | None, unknown: str) -> str:
    return unknown if value is None else "yes" if value else "no"
