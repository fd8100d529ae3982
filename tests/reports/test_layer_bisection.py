from __future__ import annotations

from collections.abc import Callable

from assay.harness.drivers.bisect.layer_search import RestoredLayer
from assay.harness.drivers.bisect.layer_task import LayerBisection, ProbeRecord
from assay.harness.statement import state
from assay.harness.verdict import Finding
from assay.reports.bisection import layers_document
from assay.reports.document import Document

PROBES = tuple(
    ProbeRecord(
        candidate=candidate, right=32 - lost, lost=lost, gained=0, p=0.5**lost, outcome=outcome, with_prefix=32, seconds=1
    )
    for candidate, lost, outcome in (((), 0, "right"), ((0, 1, 2, 3, 12), 20, "wrong"))
)  # fmt: skip
FINDING = Finding(
    id="layers", title="layers", severity="serious", where="layer 12 of 0-3, 12", diagnosis="must run triton",
    evidence=("layer 12: wrong alone",), reproduce="assay bisect layers --candidate=[red]mine",
)  # fmt: skip
FOUND = LayerBisection(
    outcome="found", why=state("With the reference in layer 12 the task is right."), reference="triton", candidate="[red]mine",
    model="tiny", device="cpu", engine="SGLang", phases=("extend",), layers=(0, 1, 2, 3, 12), prompts=32, by="answers",
    known=32, reference_right=32, floor=0, candidate_floor=0,
    alpha=0.05, restored=(RestoredLayer(12, True),), monotone=True, probes=PROBES,
    findings=(FINDING,), reproduce=FINDING.reproduce, seconds=9.0,
)  # fmt: skip


def test_a_bisection_is_what_it_was(golden: Callable[[str, Document], None]) -> None:
    """Probes are rows with abbreviated layers, a finding comes with its command, and a name is not markup."""
    golden("layer-bisection", layers_document(FOUND))
