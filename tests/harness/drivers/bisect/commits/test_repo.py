from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.drivers.bisect.commits.repo import Repository
from assay.harness.errors import AssayError, UsageError


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file of a checkout, including its index and refs, but not git's list of worktrees."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git/worktrees" not in str(path)
    }


@pytest.fixture
def made(histories: ModuleType, tmp_path: Path) -> object:
    # 0 - 1 - 3 - 4 with 0 - 2 - 3: a branch that is merged.
    return histories.make(tmp_path / "repo", [(), (0,), (0,), (1, 2), (3,)], lambda i: f"NUMBER = {i}\n")


def test_the_range_holds_commits_of_bad_that_good_lacks(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    listed = repository.between(commits[1], commits[4])
    assert [*listed] == [commits[2], commits[3], commits[4]]
    assert listed[commits[2]] == "Change 2"


def test_good_must_be_an_ancestor_of_bad(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=f"merge base {commits[0][:12]}"):
        repository.between(commits[1], commits[2])
    with pytest.raises(UsageError, match="same commit"):
        repository.between(commits[1], commits[1])
    with pytest.raises(UsageError, match="no commit 'nowhere'"):
        repository.resolve("nowhere")
    with pytest.raises(UsageError, match="no commit '--all'"):
        repository.resolve("--all")


def test_a_commit_is_described_with_its_diffstat(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    note = repository.describe(commits[3])
    assert note.parents == (commits[1], commits[2])
    assert "attn.py | 2 +-" in note.diffstat
    assert "attn.py | 1 +" in repository.describe(commits[0]).diffstat, "the root, compared with an empty tree"


def test_the_checkout_is_not_touched(made: object, histories: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    (path / "attn.py").write_text("edited\n")
    (path / "new.py").write_text("untracked\n")
    histories.git(path, "add", "new.py")
    hook = path / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {path}/hook-ran\n")
    hook.chmod(0o755)
    before = contents(path)
    with monkeypatch.context() as hook_of_git:  # it sets these for what it starts
        hook_of_git.setenv("GIT_DIR", str(path.parent / "elsewhere"))
        hook_of_git.setenv("GIT_INDEX_FILE", str(path / ".git" / "index"))
        repository = Repository(path)
        with repository.worktree() as tree:
            repository.checkout(tree, commits[0])
    assert contents(path) == before
    with repository.worktree() as tree:
        for commit, number in ((commits[1], 1), (commits[4], 4), (commits[0], 0)):
            repository.checkout(tree, commit)
            assert (tree / "attn.py").read_text() == f"NUMBER = {number}\n"
        assert not tree.is_relative_to(path)
    assert contents(path) == before
    assert not tree.parent.exists()
    assert histories.git(path, "worktree", "list").count("\n") == 1


def test_a_checkout_leaves_nothing_of_another_commit(made: object) -> None:
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    repository = Repository(path)
    with repository.worktree() as tree:
        repository.checkout(tree, commits[1])
        exclude = path / ".git" / "info" / "exclude"
        exclude.write_text("*.o\n")
        for name in ("built.o", "untracked.py"):
            (tree / name).write_text("")
        (tree / "attn.py").write_text("changed by the build\n")
        repository.checkout(tree, commits[2])
        assert sorted(p.name for p in tree.iterdir() if p.name != ".git") == ["attn.py"]
        assert (tree / "attn.py").read_text() == "NUMBER = 2\n"
        with pytest.raises(AssayError, match="checkout failed"):
            repository.checkout(tree, "0" * 40)


def test_filters_of_the_repository_s_own_configuration_do_not_run(made: object, tmp_path: Path) -> None:
    """A checkout of somebody else's commit runs no command that the repository's configuration names."""
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    ran = tmp_path / "ran"
    (path / ".git" / "info" / "attributes").write_text("* filter=mi=ne\n")
    for key, value in (("smudge", f"touch {ran}; cat"), ("clean", f"touch {ran}; cat"), ("required", "true")):
        subprocess.run(["git", "config", f"filter.mi=ne.{key}", value], cwd=path, check=True)
    repository = Repository(path)
    with repository.worktree() as tree:
        repository.checkout(tree, commits[1])
        assert list(tree.glob("*.py"))
    assert not ran.exists()


def test_halving_begins_with_the_commit_that_divides_most_evenly(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    order = repository.halving(commits[4], [commits[0]])
    assert order[0] in (commits[1], commits[2], commits[3])
    assert set(order) == set(commits[1:])
    assert repository.halving(commits[4], [commits[0], commits[2]])[-1] == commits[4]
    assert commits[2] not in repository.halving(commits[4], [commits[2]])


def test_worktrees_of_killed_processes_are_removed_and_those_of_live_ones_are_not(made: object, histories: ModuleType) -> None:
    path = made.path  # type: ignore[attr-defined]
    script = (
        "import time; from pathlib import Path; from assay.harness.drivers.bisect.commits.repo import Repository\n"
        f"with Repository(Path({str(path)!r})).worktree() as tree:\n    print(tree, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with Repository(path).worktree() as ours:
            assert theirs.exists(), "its process is alive"
            assert ours != theirs
        os.kill(other.pid, signal.SIGKILL)
    assert theirs.exists()
    with Repository(path).worktree():
        assert not theirs.parent.exists()
    assert histories.git(path, "worktree", "list").count("\n") == 1


def test_worktrees_that_only_look_like_ours_are_not_removed(histories: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "assay-worktree-of-the-user"
    made = histories.make(folder / "repo", [(), (0,)], lambda i: f"NUMBER = {i}\n")
    histories.git(made.path, "worktree", "add", "--quiet", "--detach", str(tmp_path / "assay-worktree-2" / "mine"))
    (folder / ".lock").write_text("")
    with Repository(made.path).worktree():
        pass
    assert (made.path / "attn.py").exists(), "the repository itself"
    assert (tmp_path / "assay-worktree-2" / "mine" / "attn.py").exists(), "a worktree without our lock"
