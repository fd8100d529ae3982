"""git: the range, the description of a commit, and private worktrees. The user's checkout and index are never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from assay.harness.bisect.commits.state import CommitInfo, RangeCommit
from assay.harness.errors import AssayError, UsageError

# Disable everything of the user's that runs automatically: hooks, background maintenance, a file watcher.
_QUIET = (
    "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.fsmonitor=false",
    "-c", "advice.detachedHead=false", "-c", "log.showSignature=false", "-c", "core.quotePath=false",
)  # fmt: skip
_PACK, _EDGES = "pack", "shallow"
"""Files of a copy: the range's objects, and the commits of it whose parents it lacks."""
_FIELDS = "%H%x1f%P%x1f%an <%ae>%x1f%aI%x1f%s%x1f%b"


class _GitFailed(AssayError):
    """A git command failed; no commit is to blame. Exit code 3."""


class Repository:
    """A git repository; only its list of worktrees is written to."""

    def __init__(self, path: Path) -> None:
        """Find the repository that `path` lies in.

        Raises:
            UsageError: there is none, or git is not installed.
        """
        if shutil.which("git") is None:
            raise UsageError("git is not installed.", "the command git", "install git")
        self.path = path
        answer = self._run("rev-parse", "--show-toplevel", "--git-common-dir", check=False)
        if answer.returncode:
            raise UsageError(
                f"{path} is not in a git repository with a working tree: {answer.stderr.strip()}",
                "a folder of one",
                "give --repo",
            )
        top, common = answer.stdout.splitlines()
        self.common = (path / common).resolve()
        self.path = Path(top)
        self._without_filters = self._off()

    def resolve(self, revision: str) -> str:
        """Resolve a revision to the hash of its commit.

        Raises:
            UsageError: there is no such commit.
        """
        answer = self._run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False
        )
        if answer.returncode:
            raise UsageError(
                f"{self.path} has no commit {revision!r}.", "a branch, a tag or a hash", "check --good, --bad"
            )
        return answer.stdout.strip()

    def between(self, good: str, bad: str, first_parent: bool) -> tuple[RangeCommit, ...]:
        """List the commits reachable from `bad` and not from `good`, parents before children.

        Raises:
            UsageError: `good` is not an ancestor of `bad`, or is the same commit.
        """
        if good == bad:
            raise UsageError(f"good and bad are the same commit {good[:12]}.", "two commits", "check --good and --bad")
        if self._run("merge-base", "--is-ancestor", good, bad, check=False).returncode:
            base = self._run("merge-base", good, bad, check=False).stdout.strip()
            raise UsageError(
                f"{good[:12]} is not an ancestor of {bad[:12]}.",
                "a good revision that the bad one descends from",
                f"give their merge base {base[:12]} as --good if it is good; if it is bad, they never shared a good kernel"
                if base
                else "give revisions with a common history",
            )
        order = ["--topo-order", "--reverse", *(["--first-parent"] if first_parent else [])]
        lines = self._run("log", "-z", "--format=%H%x1f%P%x1f%s", *order, bad, f"^{good}").stdout.split("\0")
        place: dict[str, int] = {}
        listed: list[RangeCommit] = []
        for line in filter(None, lines):
            commit, parents, subject = line.strip("\n").split("\x1f")
            followed = parents.split()[: 1 if first_parent else None]
            place[commit] = len(listed)
            listed.append(
                RangeCommit(commit=commit, subject=subject, parents=tuple(place[p] for p in followed if p in place))
            )
        return tuple(listed)

    def describe(self, commit: str) -> CommitInfo:
        """Return a commit's message and its diffstat against its first parent."""
        text = self._run("log", "-1", f"--format={_FIELDS}", commit).stdout
        full, parents, author, date, subject, body = text.rstrip("\n").split("\x1f")
        first = f"{commit}^1" if parents else self._run("hash-object", "-t", "tree", "/dev/null").stdout.strip()
        stat = self._run("diff", "--stat=100", "--no-color", "--no-ext-diff", first, commit).stdout.rstrip()
        return CommitInfo(
            commit=full, subject=subject, body=body.strip(), author=author, date=date, diffstat=stat,
            parents=tuple(parents.split()),
        )  # fmt: skip

    def add_worktree(self, tree: Path, commit: str) -> None:
        """Add a worktree of a commit, which is not checked out yet.

        Raises:
            GitFailed: git cannot create one.
        """
        self._run("worktree", "add", "--detach", "--no-checkout", str(tree), commit)

    def remove_worktrees(self, folder: Path) -> None:
        """Remove a folder and the worktrees in it."""
        for tree in self.linked_worktrees():
            if tree.is_relative_to(folder):
                self._run("worktree", "remove", "--force", "--force", str(tree), check=False)
        shutil.rmtree(folder, ignore_errors=True)
        self._run("worktree", "prune", check=False)  # entries whose folders are gone

    def linked_worktrees(self) -> list[Path]:
        """List the worktrees that git knows of, without the repository's own."""
        lines = self._run("worktree", "list", "--porcelain").stdout.splitlines()
        return [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")][1:]

    def write_copy(self, good: str, bad: str, folder: Path) -> None:
        """Write what `from_copy` needs: these revisions, all between them, and nothing of what lies before.

        Raises:
            GitFailed: git failed, for instance because the disk is full.
        """
        listed = self._run("rev-list", "--boundary", bad, f"^{good}").stdout.split()
        edges = [commit[1:] for commit in listed if commit.startswith("-")]
        asked = [*(f"--shallow {commit}" for commit in edges), bad, *edges]
        folder.mkdir(parents=True, exist_ok=True)
        self._run("pack-objects", "--revs", "--quiet", str(folder.resolve() / _PACK), given="\n".join(asked) + "\n")
        (folder / _EDGES).write_text("".join(f"{commit}\n" for commit in edges))

    @classmethod
    def from_copy(cls, copy: Path, path: Path) -> Repository:
        """Make a repository without branches of what `write_copy` wrote.

        Raises:
            GitFailed: git failed, for instance because the disk is full.
        """
        path.mkdir(parents=True)
        _run_git(path, "init", "--quiet")
        for file in copy.glob(f"{_PACK}-*"):
            shutil.copy(file, path / ".git" / "objects" / "pack")
        shutil.copy(copy / _EDGES, path / ".git" / "shallow")
        return cls(path)

    def _off(self) -> dict[str, str]:
        """Return settings of git that turn off the filters that the repository's own configuration names.

        Their commands would run at each checkout. Those of the user, as of Git LFS, stay.
        """
        names = r"^filter\..*\.(smudge|clean|process|required)$"
        listed = self._run(
            "config", "--local", "--includes", "--null", "--name-only", "--get-regexp", names, check=False
        )
        return {key: "false" if key.endswith(".required") else "" for key in listed.stdout.split("\0") if key}

    def checkout(self, tree: Path, commit: str, keep_ignored: bool) -> None:
        """Check a commit out in a worktree, with nothing left of another one but, if `keep_ignored`, the files that git ignores.

        Raises:
            GitFailed: git failed, for instance because the disk is full.
        """
        _run_git(tree, "checkout", "--quiet", "--force", "--detach", commit, settings=self._without_filters)
        _run_git(tree, "clean", "--quiet", "-ff", "-d", *([] if keep_ignored else ["-x"]))

    def _run(self, *args: str, check: bool = True, given: str = "") -> subprocess.CompletedProcess[str]:
        return _run_git(self.path, *args, check=check, given=given)


def _run_git(
    folder: Path, *args: str, check: bool = True, settings: Mapping[str, str] = MappingProxyType({}), given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, without the environment variables that a hook or another git command sets.

    Args:
        folder: the folder.
        args: of git.
        check: whether a failure is raised.
        settings: of its configuration, for this command.
        given: its standard input.

    Raises:
        GitFailed: it failed, and `check` is set.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
    environment["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    done = subprocess.run(
        ["git", *_QUIET, *args], cwd=folder, env=environment, check=False, capture_output=True, text=True,
        errors="replace", input=given, start_new_session=True,
    )  # fmt: skip
    if check and done.returncode:
        raise _GitFailed(
            f"git {args[0]} failed in {folder}: {done.stderr.strip()}", "a sound repository and room on the disk",
            "see git's message; the same command then resumes",
        )  # fmt: skip
    return done
