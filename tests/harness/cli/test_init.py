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

from assay.harness.cli.init import _starter_files, _the_kernel
from assay.harness.config import make_spec
from assay.harness.errors import UsageError

ROOT = Path(__file__).parents[3]
KERNEL = """
import torch
from assay import AttentionCall, declares, oracle

@declares(phases=["decode"], dtypes=["float32"], head_dims=[64])
def forward(call: AttentionCall) -> torch.Tensor:
    return oracle(call).to(call.q.dtype)

def helper(call: AttentionCall, other: int) -> None: ...
def _private(call: AttentionCall) -> None: ...
"""
FILES = {"assay.toml", "tests/test_assay.py", ".github/workflows/assay.yml"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(KERNEL)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text(KERNEL)
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
    done = run(repository, "assay", "init")
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
    assert commands == ["assay check mine.attention:forward", "python -m pytest tests/test_assay.py"]
    for command in commands:
        ran = run(repository, *command.removeprefix("python -m ").split())
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_nothing_is_overwritten(repository: Path, init: Callable[..., tuple[int, str, str]]) -> None:
    (repository / "assay.toml").write_text("# mine\n")
    code, out, _ = init(repository, "mine.attention:forward")
    assert (code, "kept   assay.toml" in out) == (0, True)
    assert (repository / "assay.toml").read_text() == "# mine\n"
    before = {name: (repository / name).read_text() for name in FILES}
    assert init(repository)[0] == 0
    assert {name: (repository / name).read_text() for name in FILES} == before


def test_several_kernels_or_none_are_a_usage_error(repository: Path) -> None:
    (repository / "src" / "more").mkdir(parents=True)
    (repository / "src" / "more" / "flash.py").write_text("def forward(call: 'assay.AttentionCall'): ...\n")
    with pytest.raises(UsageError, match=r"2 kernels were found in .*: mine\.attention:forward, more\.flash:forward\.") as one:
        _the_kernel(repository)
    assert "assay init mine.attention:forward" in one.value.do
    (repository / "mine" / "attention.py").write_text("def broken(:\n")
    (repository / "src" / "more" / "flash.py").unlink()
    with pytest.raises(UsageError, match="No kernel was found"):
        _the_kernel(repository)


def test_an_installable_repository_is_installed_in_ci() -> None:
    files = _starter_files("sage_attn", 0.02, "assay-harness @ git+https://example.org/assay", is_package=True)
    assert "pip install -e ." in files[".github/workflows/assay.yml"]
    assert "ASSAY: assay-harness @ git+https://example.org/assay\n" in files[".github/workflows/assay.yml"]
    assert tomllib.loads(files["assay.toml"])["run"]["candidate"] == "sage_attn"
    assert "def test_sage_attn_is_correct(assay):" in files["tests/test_assay.py"]
