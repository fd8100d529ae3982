"""The projects in examples/ do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.cli.app import load_command
from assay.harness.config import make_spec

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
KERNELS, TRITON, ENGINE, NIGHTLY = (EXAMPLES / name for name in ("kernel-repository", "triton-kernel", "engine-gate", "nightly"))


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(python: Run) -> Run:
    """A function that runs a module in a folder, as a user does who has installed assay."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)  # assay sets it where there is no GPU
    return lambda folder, *arguments: python("-m", *arguments, cwd=folder, env=env, timeout=580)


@pytest.mark.slow
def test_the_kernel_repository_passes_its_tests(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(KERNELS, tmp_path / "repository")
    done = run(folder, "pytest", "-v", "-p", "no:cacheprovider", "-k", "correct or 64+0- or 64+16-")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"::(test_\w+)\S* PASSED", done.stdout)
    assert set(ran) == set(re.findall(r"def (test_\w+)", (folder / "tests" / "test_attention.py").read_text()))
    assert re.search(r"^assay: 1 kernel, \d+ calls, worst 0\.\d+ of its bound", done.stdout, re.MULTILINE)


def test_the_kernel_repository_publishes_its_kernel() -> None:
    project = tomllib.loads((KERNELS / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["assay.kernels"] == {"fastattn": "fastattn.attention:forward"}
    assert {line.split(">")[0] for line in project["dependencies"]} == {"torch", "assay-harness"}


@pytest.mark.interpreter
@pytest.mark.slow
def test_the_triton_kernel_is_correct_and_says_what_it_refuses(run: Run) -> None:
    few = ("--phase", "extend", "--head-dim", "64", "--case", "extend-7+")
    done = run(TRITON, "assay", "check", "triton_attention:forward", "--dtype", "float16", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = run(TRITON, "assay", "check", "triton_attention:forward", "--dtype", "float32", *few)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "its declaration excludes float32" in refused.stderr


@pytest.mark.interpreter
@pytest.mark.slow
def test_the_triton_kernel_passes_its_tests(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(TRITON, tmp_path / "kernel")
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_engine_gate_is_policy_and_flags_that_assay_takes() -> None:
    spec = make_spec({"candidate": "flashinfer"}, ENGINE / "assay.toml")
    assert (spec.reference.backend, spec.policy.require) == ("triton", ("accuracy", "layers"))
    assert "assay.toml" in spec.policy.line("margin")
    workflow = (ENGINE / ".github" / "workflows" / "assay.yml").read_text()
    (command,) = re.findall(r"assay\" gate((?:\s+(?:--[a-z-]+|[^\s-]\S*))+)", workflow.replace("${{ matrix.backend }}", "fa3"))
    known = {option for parameter in load_command("gate").params for option in parameter.opts}
    assert {"--reference", "--candidate-python"} < set(re.findall(r"--[a-z-]+", command)) <= known


def test_the_nightly_sweep_is_three_models_times_four_kernels(
    call: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(NIGHTLY)
    assert call("sweep", "--dry-run") == 0
    assert len(re.findall(r"^to run +\w+ +assay run ", capsys.readouterr().out, re.MULTILINE)) == 12


def test_the_nightly_workflow_has_commands_that_assay_takes() -> None:
    files = (Path(".github", "workflows", "nightly.yml"), "README.md")
    texts = [(NIGHTLY / name).read_text() for name in files]
    given = [words for text in texts for words in re.findall(r"assay ((?:sweep|runs)\b[^#&\n]*)", text)]
    assert len(given) == 6
    for words in given:
        known = {option for parameter in load_command(words.split()[0]).params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= known


def test_the_nightly_workflow_installs_the_versions_of_the_cpu_profile() -> None:
    workflow = (NIGHTLY / ".github" / "workflows" / "nightly.yml").read_text()
    pins = re.findall(r"pip install (?:--no-deps )?(\w+==[\d.]+)", workflow)
    known = (ROOT / "requirements" / "cpu.txt").read_text().split() + re.findall(
        r'"(sglang==[\d.]+)"', (ROOT / "noxfile.py").read_text()
    )
    assert [pin.partition("==")[0] for pin in pins] == ["torch", "sglang"]
    assert {*pins} <= {*known}


@pytest.mark.slow
def test_the_nightly_sweep_stops_wrong_kernels_before_any_server(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(NIGHTLY, tmp_path / "nightly")
    done = run(folder, "assay", "sweep", "check", "--set", "candidate=kernels:top_left,kernels:off_by_a_percent", "--out", "swept")
    assert done.returncode == 1, done.stdout + done.stderr
    cells = json.loads((folder / "swept" / "report.json").read_text())["cells"]
    assert [cell["verdict"] for cell in cells] == ["regression", "regression"]


@pytest.mark.server
@pytest.mark.slow
def test_the_engine_gate_on_the_cpu(run: Run, tmp_path: Path) -> None:
    """The command that its README gives for a machine without a GPU, with fewer questions and a wider margin."""
    folder = shutil.copytree(ENGINE, tmp_path / "engine")
    (command,) = re.findall(r"^assay (gate --device cpu .*)$", (ENGINE / "README.md").read_text(), re.MULTILINE)
    few = command.replace("--questions 256 --margin 0.05", "--questions 48 --margin 0.1")
    assert few != command
    done = run(folder, "assay", *few.split(), "--out", "run")
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    report = json.loads((folder / "run" / "report.json").read_text())
    assert (done.returncode, report["verdict"]) == (0, "pass"), done.stdout + done.stderr
    assert (folder / "run" / "report.junit.xml").exists()
