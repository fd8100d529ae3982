from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.bisect.commits.repo import Repository, _GitFailed
from assay.harness.bisect.commits.worktrees import Worktrees, worktrees
from assay.harness.errors import UsageError


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


@contextmanager
def tree_at(repository: Repository, tree: Path, commit: str) -> Iterator[Path]:
    repository.add_worktree(tree, commit)
    yield tree
    repository.remove_worktrees(tree)
    assert not repository.linked_worktrees()


@contextmanager
def tree_of(repository: Repository) -> Iterator[Path]:
    with worktrees(repository) as folder, Worktrees(repository, folder).lend(repository.resolve("HEAD")) as tree:
        yield tree.path


def test_the_range_holds_commits_of_bad_that_good_lacks(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    listed = repository.between(commits[1], commits[4], first_parent=False)
    assert [one.commit for one in listed] == [commits[2], commits[3], commits[4]]
    assert [one.parents for one in listed] == [(), (0,), (1,)]
    first = repository.between(commits[1], commits[4], first_parent=True)
    assert [one.commit for one in first] == [commits[3], commits[4]]
    assert [one.parents for one in first] == [(), (0,)]
    assert listed[0].subject == "Change 2"


def test_good_must_be_an_ancestor_of_bad(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=f"merge base {commits[0][:12]}"):
        repository.between(commits[1], commits[2], first_parent=False)
    with pytest.raises(UsageError, match="same commit"):
        repository.between(commits[1], commits[1], first_parent=False)
    with pytest.raises(UsageError, match="no commit 'nowhere'"):
        repository.resolve("nowhere")
    with pytest.raises(UsageError, match="no commit '--all'"):
        repository.resolve("--all")


def test_no_repository_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not in a git repository"):
        Repository(tmp_path)


def test_a_commit_is_described_with_its_diffstat(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    note = repository.describe(commits[3])
    assert note.parents == (commits[1], commits[2])
    assert "attn.py | 2 +-" in note.diffstat
    assert "attn.py | 1 +" in repository.describe(commits[0]).diffstat, "the root, compared with an empty tree"


def test_the_checkout_is_not_touched(made: object, histories: ModuleType) -> None:
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    (path / "attn.py").write_text("edited\n")
    (path / "new.py").write_text("untracked\n")
    histories.git(path, "add", "new.py")
    hook = path / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {path}/hook-ran\n")
    hook.chmod(0o755)
    before = contents(path)
    repository = Repository(path)
    with tree_of(repository) as tree:
        for commit, number in ((commits[1], 1), (commits[4], 4), (commits[0], 0)):
            repository.checkout(tree, commit, keep_ignored=False)
            assert (tree / "attn.py").read_text() == f"NUMBER = {number}\n"
        assert not tree.is_relative_to(path)
    assert contents(path) == before
    assert not tree.parent.parent.exists()
    assert histories.git(path, "worktree", "list").count("\n") == 1


def test_a_checkout_leaves_nothing_of_another_commit_except_kept_files(made: object) -> None:
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    repository = Repository(path)
    with tree_of(repository) as tree:
        repository.checkout(tree, commits[1], keep_ignored=False)
        exclude = repository.common / "info" / "exclude"
        exclude.write_text("*.o\n")
        for name in ("built.o", "untracked.py"):
            (tree / name).write_text("")
        (tree / "attn.py").write_text("changed by the build\n")
        repository.checkout(tree, commits[2], keep_ignored=True)
        assert sorted(p.name for p in tree.iterdir() if p.name != ".git") == ["attn.py", "built.o"]
        assert (tree / "attn.py").read_text() == "NUMBER = 2\n"
        repository.checkout(tree, commits[2], keep_ignored=False)
        assert not (tree / "built.o").exists()
        with pytest.raises(_GitFailed, match="checkout failed"):
            repository.checkout(tree, "0" * 40, keep_ignored=False)


def test_a_copy_holds_the_range_and_nothing_before_it(histories: ModuleType, tmp_path: Path) -> None:
    # 0 - 1 - 2 - 4 - 5 with 1 - 3 - 4: the range from 2 on has 3, whose parent 1 lies before it.
    shape = [(), (0,), (1,), (1,), (2, 3), (4,)]
    made = histories.make(tmp_path / "repo", shape, lambda i: f"NUMBER = {i}\n")
    repository = Repository(made.path)
    repository.write_copy(made.commits[2], made.commits[5], tmp_path / "copy")
    copy = Repository.from_copy(tmp_path / "copy", tmp_path / "elsewhere")
    made.path.rename(tmp_path / "gone")
    with tree_at(copy, tmp_path / "tree", made.commits[5]) as tree:
        for number in (2, 3, 4, 5):
            copy.checkout(tree, made.commits[number], keep_ignored=False)
            assert (tree / "attn.py").read_text() == f"NUMBER = {number}\n"
        with pytest.raises(_GitFailed, match="checkout failed"):
            copy.checkout(tree, made.commits[0], keep_ignored=False)
    assert histories.git(copy.path, "log", "--format=%s", made.commits[5]).split("\n")[0] == "Change 5", "a build may ask for it"
    assert copy.describe(made.commits[4]).parents == (made.commits[2], made.commits[3])


def test_variables_of_a_hook_are_ignored(made: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(path / ".git" / "index"))
    before = contents(path)
    repository = Repository(path)
    with tree_of(repository) as tree:
        repository.checkout(tree, commits[0], keep_ignored=False)
    assert contents(path) == before


def test_filters_of_the_repository_s_own_configuration_do_not_run(made: object, tmp_path: Path) -> None:
    """A checkout of somebody else's commit runs no command that the repository's configuration names."""
    path, commits = made.path, made.commits  # type: ignore[attr-defined]
    ran = tmp_path / "ran"
    (path / ".git" / "info" / "attributes").write_text("* filter=mi=ne\n")
    for key, value in (("smudge", f"touch {ran}; cat"), ("clean", f"touch {ran}; cat"), ("required", "true")):
        subprocess.run(["git", "config", f"filter.mi=ne.{key}", value], cwd=path, check=True)
    repository = Repository(path)
    with tree_of(repository) as tree:
        repository.checkout(tree, commits[1], keep_ignored=False)
        assert list(tree.glob("*.py"))
    assert not ran.exists()
