"""What a run needs of this environment, where each thing is missing in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from assay.harness import cli
from assay.harness.config import make_spec
from assay.harness.engines.sglang import catalog
from assay.harness.errors import UsageError
from assay.harness.run import doctor
from assay.harness.run.doctor import Examination, _RunNeed, examine

KERNELS = """
import torch
from assay import oracle
def right(call): return oracle(call).to(call.q.dtype)
def raises(call): raise ValueError("no such head")
def short(call): return call.q[:1]
def infinite(call): return torch.full_like(call.q, float("inf"))
"""
RIGHT = "assay.harness.attention.bugs.faults:rounded_oracle"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernels_of_the_doctor.py").write_text(KERNELS)


def examined(**flags: object) -> dict[str, _RunNeed]:
    return {one.id: one for one in examine(make_spec({"candidate": RIGHT, **flags}))}


def test_where_everything_is_here_each_line_says_what_is() -> None:
    found = examined()
    assert {one.status for one in found.values()} <= {"ok", "not needed"}, found
    assert found["first-call"].found == "an output of shape (4, 2, 64)"
    assert "two servers fit" in found["memory"].found
    assert all(one.found and "\n" not in one.found for one in found.values())


@pytest.mark.parametrize(
    ("kernel", "says"),
    [("raises", "raised ValueError: no such head"), ("short", "returned torch.float32 [1, 2, 64]"), ("infinite", "not finite")],
)
def test_a_first_call_that_fails_is_shown(kernel: str, says: str) -> None:
    name = f"kernels_of_the_doctor:{kernel}"
    call = examined(candidate=name)["first-call"]
    assert (call.status, says in call.found) == ("missing", True), call
    assert f"assay check {name}" in call.do


def test_a_candidate_that_cannot_be_imported_is_not_called() -> None:
    found = examined(candidate="no.such:kernel")
    assert found["candidate"].status == "missing"
    assert "cannot be imported" in found["candidate"].found
    assert "first-call" not in found


@pytest.mark.sglang
def test_without_a_candidate_the_engines_own_backends_are_examined() -> None:
    found = {one.id: one for one in examine(make_spec({}), candidate_named=False)}
    assert "torch_native" in found["candidate"].found
    assert "sage_attn" not in found["candidate"].found
    assert (found["candidate"].status, found["first-call"].status) == ("ok", "ok")


def test_without_sglang_and_without_a_gpu_the_rest_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[str, ...]:
        raise UsageError("SGLang is not installed.", "", "pip install sglang")

    monkeypatch.setattr(catalog, "backends", none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("assay.harness.engines.memory.available_bytes", lambda device: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "missing_packages", lambda extra="": ["aiohttp"] if extra else [])
    found = examined(device="cuda", candidate="kernels_of_the_doctor:right")
    missing = {one.id for one in found.values() if one.status == "missing"}
    assert missing == {"sglang", "gpu", "memory", "compiler", "packages"}
    assert all(found[id_].do for id_ in missing)
    assert found["disk"].status == "ok"
    assert Examination(device="cuda", examined=tuple(found.values())).exit_code == 3


def test_on_the_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert examined()["compiler"].status == "not needed"


def test_a_full_disk_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FREE_GIB", 1e9)
    assert examined()["disk"].status == "missing"


@pytest.mark.parametrize(("kernel", "code"), [("right", 0), ("raises", 3)])
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kernel: str, code: int) -> None:
    for json_flag in ([], ["--json"]):
        command = ["assay", "doctor", "--candidate", f"kernels_of_the_doctor:{kernel}", *json_flag]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
    text, _, document = capsys.readouterr().out.partition("{\n")
    assert ("MISSING first-call" in text) == (code == 3)
    made = json.loads("{" + document)
    assert (made["schema"], made["examined"][-1]["id"]) == ("assay.doctor/1", "first-call")
