"""``assay bisect sides`` with real CPU servers: of seven differences, two break the candidate, and only together."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.config import RunSpec
from assay.harness.drivers.bisect.sides_probes import bisect_sides
from assay.harness.progress import ProgressDisplay

pytestmark = [pytest.mark.server, pytest.mark.slow]
FAULTY = Path(__file__).parents[3] / "stand_ins/faulty_scheduler"


def test_a_flag_and_a_variable_that_break_the_candidate_together_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fault counts positions of a later chunk wrongly: it needs the flag that makes chunks, and the variable that seeds it."""
    monkeypatch.setenv("PYTHONPATH", f"{FAULTY}:{os.environ.get('PYTHONPATH', '')}")
    spec = RunSpec.of(
        reference="torch_native", suites="accuracy,greedy,logits", questions=64, logits_prompts=16, greedy_prompts=16,
        candidate_arg=(
            "--chunked-prefill-size=16", "--max-prefill-tokens=4096", "--disable-overlap-schedule", "--schedule-policy=lof",
        ),
        candidate_env=("TEST_SCHEDULER_FAULT=stale-length", "MINE=1", "TORCH_SHOW_CPP_STACKTRACES=1"),
    )  # fmt: skip
    display = ProgressDisplay(Console(file=sys.stderr))
    result, folder = bisect_sides(spec, tmp_path / "out", display)
    assert result.sets == (("--chunked-prefill-size=16", "environment.TEST_SCHEDULER_FAULT=stale-length"),)
    assert len(result.differences) == 7
    assert len(result.probes) <= 20
    assert result.steady
    assert {probe.by for probe in result.probes if probe.outcome == "bad"} <= {"logits", "texts"}
    # The same folder needs no server to say it again.
    again, _ = bisect_sides(spec, folder, display)
    assert (again.sets, len(again.probes)) == (result.sets, len(result.probes))
