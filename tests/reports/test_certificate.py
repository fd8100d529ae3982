from __future__ import annotations

from collections.abc import Callable

import pytest

from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope, Examined, Look, verdict_on
from assay.reports.document import Document, Items
from assay.reports.fault_matrix import certificate_document
from assay.reports.markdown import to_markdown

LOOK = Look(suite="op-level", caught=True, after=3, of=111)
EXAMINED = (
    Examined(
        id="lost", kind="fault", title="lost", links=("https://github.com/owner/name/issues/12",), restricted="layer 2",
        outcome="caught", looks=(LOOK,), named=True, pinned=True, findings=("lost",), seconds=30.0,
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


@pytest.mark.parametrize("read_out", [False, True])
def test_a_certificate_is_what_it_was(golden: Callable[[str, Document], None], read_out: bool) -> None:
    """Every fault has its row, and a column says what was read where that was asked for."""
    made = certificate()
    if read_out:
        exact, most, nothing = (
            EXAMINED[0].model_copy(update={"read": read, "read_exact": read.startswith("query")})
            for read in ("query i sees | all", "most of it", "")
        )
        update = {"envelope": made.envelope.model_copy(update={"read_out": True}), "examined": (exact, EXAMINED[1], most, nothing)}
        made = made.model_copy(update=update)
    golden("certificate-read" if read_out else "certificate", certificate_document(made))


def test_what_was_not_caught_is_listed_with_its_reason() -> None:
    (listed,) = (block for block in certificate_document(certificate()).body if isinstance(block, Items))
    assert listed.lines == ["unseen: missed: changes 3 calls", "honest-exact: crash: boom | bang"]


def test_what_the_declared_noise_hides_is_counted_and_listed() -> None:
    faint = EXAMINED[1].model_copy(update={"effect": 1.5, "why": "changes 3 calls (hidden by it)"})
    made = certificate()
    envelope = made.envelope.model_copy(update={"candidate": "mine:int8", "phases": ("extend",), "noise": "int8_qk"})
    made = made.model_copy(update={"envelope": envelope, "examined": (EXAMINED[0], faint)})
    assert certificate_document(made).headline.startswith("1 of 2 faults caught, 1 hidden by the noise of int8_qk; ")
    assert "unseen: missed: changes 3 calls (hidden by it)" in markdown(made)
    assert "Envelope: faults in mine:int8, extend only, noise family int8_qk, 111 calls" in markdown(made)
