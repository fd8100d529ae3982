"""The probes of a run over a stand-in for both servers: who is asked what, what is forced, and what a refusal leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from assay.evals.probes import probe_load
from assay.harness.errors import EngineError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.probes import CONDITIONS, passes_of
from assay.harness.evidence.run_file import RUN
from assay.harness.progress import ProgressDisplay
from assay.harness.run import side_probes
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.servers import make_engine
from assay.harness.sides import ROLES, Role

PROBES = ("0+3", "16+9", "33+14", "0+129", "120+16", "1024+12")
QUIET = ProgressDisplay(Console(quiet=True))
Asked = Callable[..., tuple[Plan, RunFolder]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: ModuleType, featured_server: ModuleType) -> Asked:
    """Asks both servers of a run all probes, and traces them; the candidate has a bug."""
    load = probe_load("cpu", 4096, 97)
    few = replace(load, probes=tuple(probe for probe in load.probes if probe.id in PROBES))
    monkeypatch.setattr(side_probes, "load_of", lambda plan: few)

    def ask(bug: Any = lambda served: False, roles: tuple[Role, ...] = ROLES) -> tuple[Plan, RunFolder]:
        spec = runs.spec_of("torch_native", suites="accuracy,greedy,logits", candidate_arg=("--page-size=16",))
        folder, plan = runs.run_of(tmp_path, spec), prepare(spec)
        servers = {}
        for role in roles:
            wrong = staticmethod(bug if role == "candidate" else lambda _: False)
            kind = type("Server", (featured_server.FeaturedServer,), {"bug": wrong, "started": []})
            place, side = folder.server_folder(role), spec.sides[role].launched_with({RUN: folder.nonce}, ())
            made: Any = make_engine(plan, role, place, folder.log(role), cpu_core=None, eager=False, side=side)
            servers[role] = kind(made.launch)
            servers[role].start()
        side_probes.ask_probes(servers["reference"], plan, folder, QUIET, 1)
        for server in servers.values():
            side_probes.ask_probes(server, plan, folder, QUIET)
        for role, server in servers.items():
            if side_probes.trace_open(plan, folder, role):
                side_probes.trace_sides(server, plan, folder)
        return plan, folder

    return ask


def test_both_servers_answer_under_every_condition_and_are_traced(asked: Asked) -> None:
    plan, folder = asked()
    for role, traces in (("reference", 2), ("candidate", 1)):
        made = passes_of(folder.server_folder(role), folder.nonce)
        assert [set(each.features) for each in made[: len(CONDITIONS)]] == [set(features) for features in CONDITIONS.values()]
        assert len(made) == len(CONDITIONS) + traces
        assert all(each.complete and not each.unseen for each in made), made
        assert side_probes.open_passes(plan, folder, role) == []
        assert not side_probes.trace_open(plan, folder, role)
    first, *others = (passes_of(folder.server_folder(role), folder.nonce)[0].replies for role in ROLES)
    assert [reply.decode.tokens for reply in first] == [reply.decode.tokens for reply in others[0]], "forced"


def test_the_place_is_traced_where_a_bug_shows(asked: Asked) -> None:
    _, folder = asked(lambda served: served.batch > 2)
    (traced,) = {each.traced for role in ROLES for each in passes_of(folder.server_folder(role), folder.nonce) if each.traced}
    chosen = next(each for each in passes_of(folder.server_folder("candidate"), folder.nonce) if each.traced)
    assert "batch" in chosen.features
    assert traced.probe in PROBES


def test_a_probe_that_a_server_refuses_is_recorded_and_does_not_end_the_run(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise EngineError("The server refused the prompt.")

    monkeypatch.setattr(side_probes, "ask", refuse)
    monkeypatch.setattr("assay.harness.engines.sglang.server.SGLangServer.check", lambda self: None)
    plan, folder = asked()
    made = passes_of(folder.server_folder("reference"), folder.nonce)
    assert [each.problem for each in made] == ["The server refused the prompt."] * len(CONDITIONS)
    assert not side_probes.open_passes(plan, folder, "reference")


def test_only_sides_that_differ_in_more_than_a_backend_are_asked(runs: ModuleType) -> None:
    assert not side_probes.compares_probes(prepare(runs.spec_of("triton")))
    assert not side_probes.compares_probes(
        prepare(runs.spec_of("torch_native", suites="greedy", candidate_arg=("--page-size=16",)))
    )
    plan = prepare(runs.spec_of("torch_native", candidate_arg=("--page-size=16", "--context-length=512")))
    assert side_probes.compares_probes(plan)
    assert max(len(probe.ids) for probe in side_probes.load_of(plan).probes) < 512
