from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.worktrees import Worktrees, worktrees


@pytest.fixture
def made(histories: ModuleType, tmp_path: Path) -> object:
    return histories.make(tmp_path / "repo", histories.straight(8), lambda i: f"NUMBER = {i}\n")


def test_worktrees_of_killed_processes_are_removed_and_those_of_live_ones_are_not(made: object, histories: ModuleType) -> None:
    path = made.path  # type: ignore[attr-defined]
    script = (
        "import time; from pathlib import Path; from assay.harness.bisect.commits.repo import Repository\n"
        "from assay.harness.bisect.commits.worktrees import Worktrees, worktrees\n"
        f"repository = Repository(Path({str(path)!r}))\n"
        "with worktrees(repository) as folder, Worktrees(repository, folder).lend(repository.resolve('HEAD')) as tree:\n"
        "    print(tree.path, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with worktrees(Repository(path)) as ours:
            assert theirs.exists(), "its process is alive"
            assert ours != theirs.parent.parent
        os.kill(other.pid, signal.SIGKILL)
    assert theirs.exists()
    with worktrees(Repository(path)):
        assert not theirs.parent.parent.exists()
    assert histories.git(path, "worktree", "list").count("\n") == 1
    assert not list((path / ".git").glob("worktrees/*"))


def test_worktrees_that_only_look_like_ours_are_not_removed(histories: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "assay-worktree-of-the-user" / "0"
    made = histories.make(folder / "repo", [(), (0,)], lambda i: f"NUMBER = {i}\n")
    histories.git(made.path, "worktree", "add", "--quiet", "--detach", str(tmp_path / "assay-worktree-2" / "0" / "mine"))
    (folder.parent / "assay.lock").write_text("")
    with worktrees(Repository(made.path)):
        pass
    assert (made.path / "attn.py").exists(), "the repository itself"
    assert (tmp_path / "assay-worktree-2" / "0" / "mine" / "attn.py").exists(), "a worktree without our lock"


def test_worktrees_in_use_are_lent_to_nobody_else(made: object) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    with worktrees(repository) as folder, ExitStack() as using:
        trees = Worktrees(repository, folder)
        lent = [using.enter_context(trees.lend(commits[0])) for _ in range(3)]
        assert len({tree.path for tree in lent}) == 3
        elsewhere: list[Path] = []

        def lend() -> None:
            with Worktrees(repository, folder).lend(commits[0]) as tree:
                elsewhere.append(tree.path)

        other = threading.Thread(target=lend)
        other.start()
        other.join()
        assert elsewhere[0] not in {tree.path for tree in lent}
        using.close()
        with trees.lend(commits[3]) as again:
            again.check_out(keep_ignored=False)
            assert (again.path / "attn.py").read_text() == "NUMBER = 3\n"
            with trees.lend(commits[3]) as beside:
                assert beside.path != again.path
        assert len(list(folder.glob("[0-9]*"))) == 4, "nothing was built in them: one of them is used again"
    assert not folder.exists()


def test_what_was_built_is_used_again_until_other_builds_need_its_room(made: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.harness.bisect.commits.worktrees._SPARE", 2)
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]

    def probe(number: int, fails: bool = False) -> bool:
        """Build a commit unless it is; return whether it was."""
        with trees.lend(commits[number]) as tree:
            if (built := tree.built) is False:
                tree.check_out(keep_ignored=False)
                (tree.path / "product").write_text(str(number))
                if not fails:
                    tree.keep()
            assert (tree.path / "attn.py").read_text() == f"NUMBER = {number}\n"
            assert (tree.path / "product").read_text() == str(number)
        return built

    with worktrees(repository) as folder:
        trees = Worktrees(repository, folder)
        assert [probe(number) for number in (1, 2, 3)] == [False] * 3
        assert [probe(number) for number in (1, 2, 3)] == [True] * 3
        assert [probe(number) for number in (2, 4, 1)] == [True, False, False], "1 was used last, and had to go"
        assert len(list(folder.glob("[0-9]*"))) == 3
        assert [probe(5, fails=True), probe(5)] == [False, False], "a build that failed is none"
        with trees.lend(commits[5]) as tree:
            tree.check_out(keep_ignored=False)  # a process that is killed here leaves no build
        assert [probe(5), probe(5)] == [False, True]


def test_another_machine_works_on_a_copy(made: object, tmp_path: Path) -> None:
    repository, commits = Repository(made.path), made.commits  # type: ignore[attr-defined]
    repository.write_copy(commits[0], commits[7], tmp_path / "copy")
    here, there = tmp_path / "assay-worktree-here", tmp_path / "assay-worktree-there"
    left = tmp_path / "assay-worktree-left"  # of a bisection that has ended
    with Worktrees.at(left, made.path, tmp_path / "copy").lend(commits[1]):  # type: ignore[attr-defined]
        pass
    with worktrees(repository) as folder:
        at_home = Worktrees.at(folder, made.path, tmp_path / "copy")  # type: ignore[attr-defined]
        with at_home.lend(commits[4]) as tree:
            assert tree.path in repository.linked_worktrees(), "the repository's own machine needs no copy"
    made.path.rename(tmp_path / "gone")  # type: ignore[attr-defined]
    for number in (0, 7):
        with Worktrees.at(there, made.path, tmp_path / "copy").lend(commits[number]) as tree:  # type: ignore[attr-defined]
            tree.check_out(keep_ignored=False)
            assert (tree.path / "attn.py").read_text() == f"NUMBER = {number}\n"
            assert tree.path.is_relative_to(there)
            assert tree.path.name == "repo"
    assert not left.exists()
    assert not here.exists()
