"""`assay init` in a repository: what it writes passes when run, and nothing is overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from assay.harness.cli.init import _starter_files
from assay.harness.config import make_spec

ROOT = Path(__file__).parents[3]
KERNEL = """
import torch
from assay import AttentionCall, declares, oracle

@declares(phases=["decode"], dtypes=["float32"], head_dims=[64])
def forward(call: AttentionCall) -> torch.Tensor:
    return oracle(call).to(call.q.dtype)
"""
FILES = {"assay.toml", "tests/test_assay.py", ".github/workflows/assay.yml", ".gitignore"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(KERNEL)
    return tmp_path


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(python: Run) -> Run:
    """A function that runs a module in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return lambda folder, *command: python("-m", *command, cwd=folder, env=environment)


@pytest.fixture
def init(
    call: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A function that runs `assay init` in this process; it returns the exit code and both streams."""
    imported = set(sys.modules)

    def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        return call("init", *arguments), *capsys.readouterr()

    yield run
    for name in [name for name in set(sys.modules) - imported if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def written(folder: Path) -> set[str]:
    return {name for name in FILES if (folder / name).exists()}


@pytest.mark.slow
def test_what_it_writes_passes(run: Run, repository: Path) -> None:
    done = run(repository, "assay", "init", "mine.attention:forward")
    assert done.returncode == 0, done.stderr
    assert written(repository) == FILES
    spec = make_spec({}, repository / "assay.toml")
    assert (spec.candidate.backend, spec.policy.margin, spec.weakened) == (
        "mine.attention:forward",
        make_spec({}).policy.margin,
        (),
    )
    workflow = (repository / ".github/workflows/assay.yml").read_text()
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        checked = run(repository, "check_jsonschema", "--builtin-schema", schema, ".github/workflows/assay.yml")
        assert checked.returncode == 0, checked.stdout
    commands = [line for line in re.findall(r"- run: (.*)", workflow) if "pip install" not in line]
    assert commands == ["assay check mine.attention:forward --html assay.html --junit assay.xml"]
    for command in (*commands, "python -m pytest tests/test_assay.py"):
        ran = run(repository, *command.removeprefix("python -m ").split())
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_nothing_is_overwritten(repository: Path, init: Callable[..., tuple[int, str, str]]) -> None:
    (repository / "assay.toml").write_text("# mine\n")
    code, out, _ = init(repository, "mine.attention:forward")
    assert (code, "kept   assay.toml" in out) == (0, True)
    assert (repository / "assay.toml").read_text() == "# mine\n"
    before = {name: (repository / name).read_text() for name in FILES}
    assert init(repository, "mine.attention:forward")[0] == 0
    assert {name: (repository / name).read_text() for name in FILES} == before


def test_servers_of_a_backend_are_compared(tmp_path: Path, init: Callable[..., tuple[int, str, str]], run: Run) -> None:
    (tmp_path / ".gitignore").write_text("*.log")
    assert init(tmp_path, "flashinfer")[0] == 0
    assert written(tmp_path) == FILES - {"tests/test_assay.py"}
    assert (tmp_path / ".gitignore").read_text() == "*.log\nruns/\n"
    workflow = (tmp_path / ".github/workflows/assay.yml").read_text()
    assert re.findall(r"bin/assay\" (\w+)", workflow) == ["gate"]
    assert "path: |\n            ${{ runner.temp }}/run\n" in workflow
    spec = make_spec({}, tmp_path / "assay.toml")
    assert (spec.reference.backend, spec.candidate.backend, spec.device) == ("triton", "flashinfer", "cuda")
    checked = run(tmp_path, "check_jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/assay.yml")
    assert checked.returncode == 0, checked.stdout
    assert init(tmp_path, "no-such-backend")[0] == 2


def test_an_installable_repository_is_installed_in_ci() -> None:
    files = _starter_files("sage_attn", True, "assay-harness @ git+https://example.org/assay", is_package=True)
    assert "pip install -e ." in files[".github/workflows/assay.yml"]
    assert "ASSAY: assay-harness @ git+https://example.org/assay\n" in files[".github/workflows/assay.yml"]
    assert tomllib.loads(files["assay.toml"])["run"]["candidate"] == "sage_attn"
    assert "def test_sage_attn_is_correct(assay):" in files["tests/test_assay.py"]
