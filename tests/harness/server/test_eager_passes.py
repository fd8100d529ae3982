from __future__ import annotations

from assay.harness.server.eager_passes import refuse_while


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
