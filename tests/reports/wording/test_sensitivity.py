"""The words of a fault that was seeded in the running servers."""

from __future__ import annotations

import pytest

from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.statement import Statement, state
from assay.harness.verdict import Requirement
from assay.reports.wording.requirements import said_check

REQUIRED = Requirement("workload-sensitive")
ANSWERS = state("fault-in-answers", lost=0, gained=0, questions=8, p=1.0)
LAYERS = state("fault-in-layers", flagged=1200, cells=64, worst=16.2)


def seen(*, unmeasured: tuple[str, ...] = (), url: bool = False) -> Statement:
    parts = [("accuracy", False, ANSWERS), ("layers", True, LAYERS)]
    return state("faults-seen", fault="mask-top-left", parts=parts, unmeasured=unmeasured, url=url)


@pytest.mark.parametrize(
    ("outcome", "end", "settles"),
    [
        (seen(), "at worst 16.2 times)", "use a workload that depends on attention"),
        (seen(unmeasured=("logits",)), "; not measured by logits", RUN_AGAIN),
        (seen(unmeasured=("logits",), url=True), "; not measured by logits", "let assay start both servers"),
    ],
)
def test_it_is_said_which_suites_saw_a_fault(outcome: Statement, end: str, settles: str) -> None:
    said = said_check(REQUIRED.check("missing", outcome))
    assert said.found.startswith(
        "mask-top-left: not seen by accuracy (0 lost and 0 gained of 8 questions, p = 1); seen by layers (1,200 tests out of "
        "bounds in 64 cells, "
    )
    assert said.found.endswith(end)
    assert said.settles.startswith(settles)
    assert said.title == "not every suite saw a fault that was seeded in the running servers"


@pytest.mark.parametrize(
    ("changed", "why", "found"),
    [
        (0, "", "mask-top-left changed none of 40 calls, since none had a cached prefix"),
        (0, "windows", "mask-top-left changed none of 40 calls: windows"),
        (41, "", "mask-top-left is recorded to have changed 41 of 40 calls"),
    ],
)
def test_a_fault_that_proves_nothing_is_said_with_its_reason(changed: int, why: str, found: str) -> None:
    idle = state("fault-changed-nothing", fault="mask-top-left", changed=changed, calls=40, why=why)
    assert said_check(REQUIRED.check("missing", idle)).found == found
