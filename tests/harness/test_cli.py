"""Bad input ends with what was found, what was expected and what to do, and exit code 2; nothing is started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.attention import kernels
from assay.harness.engines.sglang import catalog
from assay.harness.errors import UsageError

SAGE = "assay.harness.attention.sage:sage_attn"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_a_kernel_is_found_in_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "kernel_of_this_test.py").write_text("def forward(call):\n    return call.q\n")
    monkeypatch.setattr(sys, "path", sys.path[:])
    flags = ["--candidate", "kernel_of_this_test:forward", "--model", "./nowhere"]
    assert call("run", "--out", "out", *flags) == 2
    assert "./nowhere" in capsys.readouterr().err, "the kernel was fine, the next thing was not"


def test_a_command_that_reads_a_file_imports_nothing_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "optional_import_of_this_test.py").write_text("raise AssertionError('ran')\n")
    (tmp_path / "server.log").write_text("Score: 0.5\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert call("ingest", str(tmp_path / "server.log")) == 3
    assert importlib.util.find_spec("optional_import_of_this_test") is None


def test_the_working_directory_is_searched_only_while_a_kernel_is_imported_and_stays_if_it_is_from_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "from_here_of_this_test.py").write_text("def forward(call):\n    return call.q\n")
    (tmp_path / "optional_import_of_this_test.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    kernels.load("sage_attn")
    assert importlib.util.find_spec("optional_import_of_this_test") is None
    kernels.load("from_here_of_this_test:forward")
    assert importlib.util.find_spec("optional_import_of_this_test") is not None, "what it imports when it is called"


def test_a_bug_is_not_a_regression(monkeypatch: pytest.MonkeyPatch, call: Callable[..., int]) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("assay.harness.run.run.prepare", broken)
    assert call("run") == 3


def test_backends_lists_kernels_and_sglangs_own(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("backends") == 0
    out = capsys.readouterr().out
    assert "sage_attn_as_shipped" in out
    assert "torch_native" in out


def test_backends_lists_what_it_can_where_sglang_or_a_kernel_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def not_installed() -> tuple[str, ...]:
        raise UsageError("SGLang is not installed.", "the package sglang", "install it")

    monkeypatch.setattr(catalog, "backends", not_installed)
    monkeypatch.setattr(kernels, "published", lambda: {"gone": "no.such:kernel", "sage_attn": SAGE})
    assert call("backends") == 0
    out = capsys.readouterr().out
    assert "gone  kernel 'gone' (no.such:kernel) cannot be imported: No module named 'no'" in out
    assert f"sage_attn  extend  {SAGE}" in out
    assert "SGLang is not installed." in out
