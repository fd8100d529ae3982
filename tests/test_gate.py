"""``assay gate`` and ``assay gate accept``: with real servers, and from made-up evidence where no server is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.harness.cli.app import load_command
from assay.harness.config import _GATE_FLAGS, FLAGS, flag
from assay.harness.evidence.baseline import FILE

ROOT = Path(__file__).parent.parent

# Few questions, so margins are wide. The kernel is fast: no interpreter is needed.
POLICY = """
[run]
candidate = "mine:attend"
questions = 48
{run}
[policy]
margin = 0.1
{policy}
"""
KERNEL = """
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.declaration import declares

attend = declares(phases=("extend",))({kernel})
"""


def write(folder: Path, kernel: str = "rounded_oracle", run: str = "", policy: str = "") -> None:
    (folder / "mine.py").write_text(KERNEL.format(kernel=kernel))
    (folder / "assay.toml").write_text(POLICY.format(run=run, policy=policy))


def stored_reference(folder: Path) -> str:
    """The line of assay.toml that lets the accepted reference stand in for its server."""
    (path,) = (folder / "baselines").glob(f"torch_native-*/{FILE}")
    return f'reference = "{path.parent.relative_to(folder)}"'


def assay(folder: Path, *arguments: str, **more: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "assay", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def report(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return made


def check(made: dict[str, Any], id_: str) -> dict[str, str]:
    (found,) = [check for check in made["checks"] if check["id"] == id_]
    return {key: str(value) for key, value in found.items()}


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the correct kernel went through the gate, and the reference was accepted."""
    folder = tmp_path_factory.mktemp("accepted")
    write(folder)
    code, out = assay(folder, "gate", "--out", "first")
    made = report(folder / "first")
    assert (code, made["verdict"]) == (0, "pass"), out
    code, out = assay(folder, "gate", "accept", "first")
    assert (code, len(list((folder / "baselines").glob(f"*/{FILE}")))) == (0, 1), out
    return folder


@pytest.mark.server
@pytest.mark.slow
def test_a_broken_kernel_is_a_regression_against_a_stored_reference_with_one_server(accepted: Path, tmp_path: Path) -> None:
    shutil.copytree(accepted / "baselines", tmp_path / "baselines")
    write(tmp_path, 'fault("mask-top-left")', run=stored_reference(tmp_path), policy='require = ["logits"]')
    summary = tmp_path / "summary.md"
    code, out = assay(
        tmp_path, "gate", "--out", "second", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary)
    )  # fmt: skip
    made = report(tmp_path / "second")
    assert (code, made["verdict"]) == (1, "regression"), out
    assert "Starting candidate mine:attend." in out
    assert {path.name for path in (tmp_path / "second").glob("*.log")} == {
        "candidate.log", "kernel.log", "witness.log"
    }, "no reference server"  # fmt: skip

    assert re.search(r"stored: baseline torch_native-\w{8}, accepted 20", made["reference"]["engine"])
    assert {c["layers"] for c in made["reference"]["calls"]} == {4}
    assert "stored reference" in check(made, "same-servers")["found"]
    assert check(made, "layers-compared")["found"] == "extend: 4 layers"
    statuses = {c["status"] for c in made["checks"] if c["id"] != "answer-lengths"}  # wrong answers may be longer, too
    assert statuses == {"ok", "not checked"}

    verdicts = {suite["id"]: suite["verdict"] for suite in made["suites"]}
    assert verdicts == dict.fromkeys(("accuracy", "greedy", "logits", "layers", "matrix"), "regression")
    assert made["findings"][0]["id"] == "mask-top-left"
    (logits,) = [suite for suite in made["suites"] if suite["id"] == "logits"]
    assert [row["condition"] for row in logits["logits"]] == ["cold", "cached"], "the reference's are stored"
    assert all(row["floor_mean_kl"] is not None for row in logits["logits"]), "and so is its floor"
    assert check(made, "required-logits")["status"] == "ok"
    assert made["reproduce"].startswith("assay gate ")
    assert re.search(r"--reference=baselines/torch_native-\w{8}", made["reproduce"])

    assert re.search(r"^::error title=assay%3A regression::", out, re.MULTILINE)
    title = made["findings"][0]["title"]
    assert re.search(rf"^::error title=[^:]*::Computes .{re.escape(title)}", out, re.MULTILINE)
    assert f'Computes "{title}"' in summary.read_text().replace("\\", "")
    assert len(summary.read_text().splitlines()) <= 64

    code, out = assay(tmp_path, "report", "second")
    assert (code, report(tmp_path / "second")["findings"]) == (1, made["findings"]), out


@pytest.mark.server
@pytest.mark.slow
def test_a_stale_baseline_is_refused_and_a_required_suite_that_did_not_run_is_no_verdict(accepted: Path, tmp_path: Path) -> None:
    shutil.copytree(accepted / "baselines", tmp_path / "baselines")
    for file in (tmp_path / "baselines").glob(f"*/{FILE}"):
        kept = json.loads(file.read_text())
        kept["key"]["engine"] = "SGLang 0.5.17 on cpu"
        file.write_text(json.dumps(kept))

    write(tmp_path, run=f'suites = ["accuracy"]\n{stored_reference(tmp_path)}')
    code, out = assay(tmp_path, "gate", "--out", "refused")
    assert (code, "engine was SGLang 0.5.17 on cpu, and is" in out) == (2, True), out

    write(tmp_path, run='suites = ["accuracy"]', policy='require = ["layers"]')
    code, out = assay(tmp_path, "gate", "--out", "second")
    made = report(tmp_path / "second")
    assert (code, made["verdict"]) == (3, "inconclusive"), out
    assert check(made, "required-layers")["status"] == "missing"
    assert "assay.toml, [policy]" in check(made, "required-layers")["found"]
    assert {suite["verdict"] for suite in made["suites"]} == {"pass"}


@pytest.mark.parametrize("name", ["run", "gate"])
def test_every_flag_that_a_repeating_command_may_have_is_one(name: str) -> None:
    command = load_command(name)
    options = {option for parameter in command.params for option in parameter.opts}
    wanted = {flag(field) for field in FLAGS if name == "gate" or field not in _GATE_FLAGS}
    assert wanted <= options
