"""The command as users call it: real git, real kernel processes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness import cli


def here(monkeypatch: pytest.MonkeyPatch, cwd: Path, *args: str) -> int:
    """Run a command in this process, so that kernel processes are forked from one that is already warm."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["assay", "bisect", *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


@pytest.mark.slow
def test_git_bisect_run(histories: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = histories.planted(tmp_path / "repo", histories.straight(3), 1, broken=[2])
    probe = ["probe", "--kernel", "attn:forward", "--calls", "6"]
    assert here(monkeypatch, made.path, *probe) == 125, "main does not import"
    histories.git(made.path, "checkout", "--quiet", made.commits[0])
    assert here(monkeypatch, made.path, *probe) == 0
    histories.git(made.path, "bisect", "start", "main", made.commits[0])
    said = histories.git(made.path, "bisect", "run", sys.executable, "-m", "assay", "bisect", *probe)
    assert f"{made.commits[1]} is the first bad commit" in said


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--kernel", "attn"], [], ["--kernel", "a:b", "--calls", "x"]])
def test_a_usage_error_stops_git_bisect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    assert here(monkeypatch, tmp_path, "probe", *flags) == 128, "2 would be a bad commit"
