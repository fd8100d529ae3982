"""The commands as users call them: real git, real kernel processes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness import cli
from assay.harness.drivers.bisect.commits.state import BisectFolder


def here(monkeypatch: pytest.MonkeyPatch, cwd: Path, *args: str) -> int:
    """Run a command in this process, so that kernel processes are forked from one that is already warm."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["assay", "bisect", *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def index_of(path: Path) -> str:
    return hashlib.sha256((path / ".git" / "index").read_bytes()).hexdigest()


def blocking_build(folder: Path, run: int) -> str:
    """A build that refuses broken sources, and whose nth run waits until ``folder/resume`` exists."""
    return (
        f"echo >> {folder}/builds; if [ $(wc -l < {folder}/builds) -eq {run} ]; then touch {folder}/blocked; "
        f"while [ ! -e {folder}/resume ]; do sleep 0.05; done; fi; ! grep -q 'return ($' attn.py"
    )


@pytest.mark.slow
def test_a_history_with_unbuildable_commits_killed_in_the_middle(
    histories: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    culprit = 21
    made = histories.planted(tmp_path / "repo", histories.straight(32), culprit, broken={8, 15, 27})
    index = index_of(made.path)
    out = tmp_path / "out"
    command = [
        "commits", "--repo", str(made.path), "--good", made.commits[0], "--bad", "main", "--kernel", "attn:forward",
        "--build", blocking_build(tmp_path, run=7), "--calls", "6", "--out", str(out),
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "assay", "bisect", *command], stdout=subprocess.DEVNULL, start_new_session=True
    ) as first:
        deadline = time.monotonic() + 300
        while not (tmp_path / "blocked").exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
    (tmp_path / "resume").touch()
    before = BisectFolder(out).read()
    assert before is not None
    assert before.result is None
    assert len(before.probes) >= 6, "killed in the search"
    assert here(monkeypatch, tmp_path, *command) == 0
    said = capsys.readouterr().out
    assert f"{made.commits[culprit][:12]} is the culprit among 31 commits" in said
    state = BisectFolder(out).read()
    assert state is not None
    assert state.result is not None
    assert [finding.id for finding in state.result.findings] == ["mask-top-left"]
    assert f"serious: {state.result.findings[0].sentence}" in said
    assert state.probes[: len(before.probes)] == before.probes, "no probe is repeated"
    assert len({p.commit for p in state.probes if p.purpose == "search" and p.came_out != "skip"}) <= 6
    assert any(p.came_out == "skip" for p in state.probes)
    assert "default-src &#39;none&#39;" in (out / "report.html").read_text()
    assert index_of(made.path) == index
    assert histories.git(made.path, "status", "--porcelain") == ""
    assert histories.git(made.path, "worktree", "list").count("\n") == 1, "the killed process's worktree is removed too"


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
    assert here(monkeypatch, tmp_path, "commits", "--no-such-flag") == 2
