"""The commands as they are called: real git, real processes for kernels."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness import cli
from assay.harness.bisect.commits.state import Folder


def assay(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "assay", "bisect", *args], cwd=cwd, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}, timeout=300,
    )  # fmt: skip


def here(monkeypatch: pytest.MonkeyPatch, cwd: Path, *args: str) -> int:
    """The same in this process, whose forked processes are warm already."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["assay", "bisect", *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def index_of(path: Path) -> str:
    return hashlib.sha256((path / ".git" / "index").read_bytes()).hexdigest()


def test_sixty_commits_some_unbuildable_killed_once(
    histories: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(5)
    broken = {i for i in range(1, 59) if rng.random() < 0.1} - {40, 41}
    made = histories.planted(tmp_path / "repo", histories.straight(60), 41, broken)
    index = index_of(made.path)
    out = tmp_path / "out"
    build = "python -m py_compile attn.py"
    command = [
        "commits", "--repo", str(made.path), "--good", made.commits[0], "--bad", "main", "--kernel", "attn:forward",
        "--build", f"{sys.executable} {build.removeprefix('python ')}", "--calls", "12", "--scan", "2", "--out", str(out),
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "assay", "bisect", *command], stdout=subprocess.DEVNULL, start_new_session=True
    ) as first:
        deadline = time.monotonic() + 120
        while not (out / "probes" / "0008.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
    before = Folder(out).read()
    assert before.result is None
    assert here(monkeypatch, tmp_path, "commits", "--status", "--out", str(out)) == 0
    assert "commits left" in capsys.readouterr().out
    assert here(monkeypatch, tmp_path, *command) == 0
    said = capsys.readouterr().out
    assert f"{made.commits[41][:12]} is the culprit, of 59 commits" in said
    assert 'agrees with "causal mask top-left"' in said
    state = Folder(out).read()
    assert state.probes[: len(before.probes)] == before.probes, "it went on"
    assert sum(p.purpose == "search" and p.outcome != "skip" for p in state.probes) <= 7
    assert "default-src &#39;none&#39;" in (out / "report.html").read_text()
    assert index_of(made.path) == index
    assert histories.git(made.path, "status", "--porcelain") == ""
    assert histories.git(made.path, "worktree", "list").count("\n") == 1, "that of the killed one is gone as well"


def test_merges_and_wrong_ends(
    histories: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(2)
    parents = histories.merging(40, rng)
    made = histories.planted(tmp_path / "repo", parents, 17)
    common = ["--repo", str(made.path), "--kernel", "attn:forward", "--calls", "6", "--scan", "0", "--repeats", "1"]
    assert here(monkeypatch, tmp_path, "commits", "--good", made.commits[-2], "--bad", "main", *common) == 2
    assert "is not good" in capsys.readouterr().err
    command = ["commits", "--good", made.commits[0], "--bad", "main", "--confidence", "0.9", *common]
    assert here(monkeypatch, tmp_path, *command) == 0
    assert f"{made.commits[17][:12]} is the culprit" in capsys.readouterr().out
    assert (tmp_path / "runs").is_dir()


def test_git_bisect_run(histories: ModuleType, tmp_path: Path) -> None:
    made = histories.planted(tmp_path / "repo", histories.straight(4), 2, broken=[3])
    assert assay(made.path, "probe", "--kernel", "attn:forward", "--calls", "6").returncode == 125, (
        "main does not import"
    )
    histories.git(made.path, "bisect", "start", "main", made.commits[0])
    words = f"run {sys.executable} -m assay bisect probe --kernel attn:forward --calls 6".split()
    said = histories.git(made.path, "bisect", *words)
    assert f"{made.commits[2]} is the first bad commit" in said


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--kernel", "attn"], [], ["--kernel", "a:b", "--calls", "x"]])
def test_wrong_use_stops_git_bisect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    assert here(monkeypatch, tmp_path, "probe", *flags) == 128, "2 would be a bad commit"
    assert here(monkeypatch, tmp_path, "commits", "--no-such-flag") == 2
