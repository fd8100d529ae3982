from __future__ import annotations

import io

from rich.console import Console

from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope, Examined, Look, verdict_on
from assay.reports.fault_matrix import certificate_document, not_caught
from assay.reports.markdown import to_markdown
from assay.reports.terminal import render

LOOK = Look(suite="op-level", caught=True, after=3, of=111)
EXAMINED = (
    Examined(
        id="lost", kind="fault", title="lost", links=("https://github.com/owner/name/issues/12",), restricted="layer 2",
        outcome="caught", looks=(LOOK,), named=True, pinned=True, found=("lost",), seconds=30.0,
    ),
    Examined(id="unseen", kind="fault", title="unseen", outcome="missed", why="changes 3 calls", seconds=30.0),
    Examined(id="same", kind="equivalent", title="same", outcome="quiet", seconds=30.0),
    Examined(id="honest-exact", kind="honest", title="honest", outcome="crash", why="boom | bang", seconds=30.0),
)  # fmt: skip


def certificate() -> Certificate:
    envelope = CertifiedEnvelope(
        level="op", device="cpu", dtypes=("float32",), torch="2", calls=111, layers=4, heads=4, most_new=600, longest=2201,
        largest_batch=3, suites=("op-level",), source="abc",
    )  # fmt: skip
    return Certificate(verdict=verdict_on(EXAMINED, ()), made="2026-01-02", envelope=envelope, examined=EXAMINED)


def markdown(made: Certificate) -> str:
    return to_markdown(certificate_document(made))


def test_the_headline_counts() -> None:
    assert certificate_document(certificate()).headline == (
        "1 of 2 faults caught; 1 of 1 with a name named; 1 of 1 pinned; 0 false alarms on 2 equivalent faults and honest kernels; "
        "1 not examined to the end; 2.0 minutes."
    )


def test_what_was_not_caught_is_listed_with_its_reason() -> None:
    assert not_caught(certificate()) == ["unseen: missed: changes 3 calls", "honest-exact: crash: boom | bang"]


def test_the_matrix_in_markdown() -> None:
    lines = markdown(certificate()).splitlines()
    reported = "[name#<!-- -->12](https://github.com/owner/name/issues/12)"
    assert f"| lost | layer 2 | {reported} | op-level | 3 of 111 calls | yes | yes |  | 30.0 |" in lines
    assert "| unseen | everywhere | no public bug known | missed |  |  |  |  | 30.0 |" in lines
    assert "| honest-exact | everywhere |  |  |  |  |  | crash: boom \\| bang | 30.0 |" in lines
    widths = {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}
    assert widths == {10}


def test_the_terminal_shows_every_fault() -> None:
    out = io.StringIO()
    render(certificate_document(certificate()), Console(file=out, width=120))
    assert all(one.id in out.getvalue() for one in EXAMINED)
    assert "boom | bang" in out.getvalue()


def test_what_was_read_has_a_column_where_it_was_asked_for() -> None:
    made = certificate()
    examined = (
        EXAMINED[0].model_copy(update={"read": "query i sees | all", "read_exact": True}),
        EXAMINED[1],
        EXAMINED[0].model_copy(update={"read": "most of it", "read_exact": False}),
        EXAMINED[0].model_copy(update={"read": "", "read_exact": False}),
    )
    read = made.model_copy(
        update={"envelope": made.envelope.model_copy(update={"read_out": True}), "examined": examined}
    )
    rows = [
        line.replace("\\|", "/").split("|")[10].strip() for line in markdown(read).splitlines() if line.startswith("|")
    ]
    assert rows == ["read", "---", "query i sees / all", "", "most of it (not exact)", "nothing"]
    out = io.StringIO()
    render(certificate_document(read), Console(file=out, width=200))
    assert "query i sees | all" in out.getvalue()
    assert "| read |" not in markdown(made)


def test_what_the_declared_noise_hides_is_counted_and_listed() -> None:
    faint = EXAMINED[1].model_copy(update={"effect": 1.5, "why": "changes 3 calls (hidden by it)"})
    made = certificate()
    envelope = made.envelope.model_copy(update={"candidate": "mine:int8", "phases": ("extend",), "noise": "int8_qk"})
    made = made.model_copy(update={"envelope": envelope, "examined": (EXAMINED[0], faint)})
    assert certificate_document(made).headline.startswith("1 of 2 faults caught, 1 hidden by the noise of int8_qk; ")
    assert not_caught(made) == ["unseen: missed: changes 3 calls (hidden by it)"]
    assert "Envelope: faults in mine:int8, extend only, noise family int8_qk, 111 calls" in markdown(made)
