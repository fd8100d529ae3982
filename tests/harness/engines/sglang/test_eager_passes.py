from __future__ import annotations

import sys

import pytest

from assay.harness.engines.sglang import eager_passes
from assay.harness.engines.sglang.eager_passes import refuse_while, run_eagerly_while


def test_a_graph_serves_a_batch_only_while_nothing_is_observed() -> None:
    class Runner:
        def can_run_graph(self, forward_batch: str) -> bool:
            return forward_batch == "small"

    observed = [False]
    refuse_while(Runner, lambda: observed[0])
    runner = Runner()
    assert (runner.can_run_graph("small"), runner.can_run_graph("large")) == (True, False)
    observed[0] = True
    assert not runner.can_run_graph(forward_batch="small")


def test_a_version_whose_runners_ask_in_another_way_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def serves(self, forward_batch: str) -> bool:
            return True

    monkeypatch.setattr(eager_passes, "RUNNERS", ((__name__, "Runner"), ("no.such.module", "Runner")))
    monkeypatch.setattr(sys.modules[__name__], "Runner", Runner, raising=False)
    run_eagerly_while(lambda: True)
    assert Runner().serves("any")
    assert not hasattr(Runner, "can_run_graph")
