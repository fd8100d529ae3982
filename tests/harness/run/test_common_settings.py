"""A run whose backends force something: it is found out once, and given to both servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from assay.harness.config import RunSpec
from assay.harness.engines.launch import Launch
from assay.harness.engines.sglang.launch import command
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.manifest import COMMON_SETTINGS, CommonSettings
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import open_folder
from assay.harness.run.servers import make_run_engine
from assay.harness.sides import ROLES, Role

FORCED = CommonSettings(flags=("--disable-cuda-graph",), because=("both were given it",), impossible=("dtype (a; b)",))


def planned(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "device": "cuda", "reference": "triton", "candidate": "torch_native", "questions": 4, "suites": ("accuracy",),
    }  # fmt: skip
    return prepare(RunSpec.of(**fields | changes))


def test_both_servers_get_what_one_backend_forces_and_it_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def agree(launches: Mapping[Role, Launch], asked: Mapping[str, object]) -> CommonSettings:
        seen.append([launches[role].backend for role in ROLES])
        return FORCED

    monkeypatch.setattr("assay.harness.engines.sglang.server.agree", agree)
    plan = planned()
    folder = open_folder(plan, tmp_path / "run")
    for role in (*ROLES, "candidate"):  # a resumed run makes one again
        engine = make_run_engine(plan, folder, role)
        assert isinstance(engine, SGLangServer)
        assert "--disable-cuda-graph" in command(engine.launch, 1, "n")
    assert seen == [["triton", "torch_native"]]
    assert folder.read(COMMON_SETTINGS) == FORCED.model_copy(update={"run": folder.nonce})


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"candidate": "triton"}, {"candidate": "http://127.0.0.1:1"}])
def test_nothing_is_looked_for_where_nothing_can_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    monkeypatch.setattr("assay.harness.engines.sglang.server.agree", lambda launches: pytest.fail("it was looked for"))
    plan = planned(**changes)
    folder = open_folder(plan, tmp_path / "run")
    for role in ROLES:
        make_run_engine(plan, folder, role)
    assert folder.read(COMMON_SETTINGS) is None
