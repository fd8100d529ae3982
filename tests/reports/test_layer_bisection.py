from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from assay.harness.drivers.bisect.layer_search import RestoredLayer
from assay.harness.drivers.bisect.layer_task import LayerBisection, ProbeRecord
from assay.harness.statement import state
from assay.harness.verdict import Finding
from assay.reports.bisection import layers_document
from assay.reports.document import Document
from assay.reports.terminal import render

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


def shown(result: LayerBisection) -> str:
    out = StringIO()
    render(layers_document(result), Console(file=out, width=160, force_terminal=True, color_system=None))
    return out.getvalue()


def test_a_bisection_is_what_it_was(golden: Callable[[str, Document], None]) -> None:
    """Probes are rows with abbreviated layers, a finding comes with its command, and a name is not markup."""
    golden("layer-bisection", layers_document(FOUND))


@pytest.mark.parametrize(("outcome", "says"), [("nothing", "No layer needs the reference: "), ("inconclusive", "No verdict: ")])
def test_the_heading_states_that_no_layer_was_found(outcome: str, says: str) -> None:
    result = FOUND.model_copy(update={"outcome": outcome, "findings": (), "probes": ()})
    text = shown(result)
    assert layers_document(result).answer.startswith(says)
    assert layers_document(result).code == result.exit_code
    assert "serious" not in text
    assert "outcome" not in text, "no empty table"


def test_repeats_are_mentioned() -> None:
    assert "each set is probed until one outcome leads by two" in shown(FOUND.model_copy(update={"floor": 1}))
