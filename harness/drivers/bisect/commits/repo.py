"""git: the range, the commit that halves it, and a worktree. The user's checkout and index stay untouched."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from assay.harness.drivers.bisect.commits.state import CommitInfo
from assay.harness.errors import AssayError, UsageError
from assay.harness.files import LOCK, lock_folder

# Disable everything of the user's that git runs automatically: hooks, background maintenance, a file watcher.
_QUIET = (
    "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.fsmonitor=false",
    "-c", "advice.detachedHead=false", "-c", "log.showSignature=false", "-c", "core.quotePath=false",
)  # fmt: skip
_FIELDS = "%H%x1f%P%x1f%an <%ae>%x1f%aI%x1f%s%x1f%b"
_PREFIX = "assay-worktree-"


class Repository:
    """A git repository, where assay writes nothing but the list of worktrees."""

    def __init__(self, path: Path) -> None:
        """Find the repository that contains `path`."""
        if shutil.which("git") is None:
            raise UsageError("git is not installed.", "the command git", "install git")
        self.path = path
        answer = self._run("rev-parse", "--show-toplevel", check=False)
        if answer.returncode:
            raise UsageError(
                f"{path} is not in a git repository with a working tree: {answer.stderr.strip()}",
                "a folder of a repository",
                "give --repo",
            )
        self.path = Path(answer.stdout.strip())
        # A checkout would run the filter commands in the repository's own configuration, so those are disabled. The user's own
        # filters, such as Git LFS, still run.
        names = r"^filter\..*\.(smudge|clean|process|required)$"
        listed = self._run("config", "--local", "--includes", "-z", "--name-only", "--get-regexp", names, check=False)
        keys = filter(None, listed.stdout.split("\0"))
        self._without_filters = {key: "false" if key.endswith(".required") else "" for key in keys}

    def resolve(self, revision: str) -> str:
        """Resolve a revision to the hash of its commit.

        Raises:
            UsageError: the commit does not exist.
        """
        answer = self._run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False
        )
        if answer.returncode:
            raise UsageError(
                f"{self.path} has no commit {revision!r}.", "a branch, a tag or a hash", "check --good, --bad"
            )
        return answer.stdout.strip()

    def is_ancestor(self, commit: str, descendant: str) -> bool:
        """Return True if a commit is an ancestor of another one, or the same commit."""
        return not self._run("merge-base", "--is-ancestor", commit, descendant, check=False).returncode

    def between(self, good: str, bad: str) -> dict[str, str]:
        """Return the subject of each commit reachable from `bad` but not from `good`, by hash, parents before children.

        Raises:
            UsageError: `good` is not an ancestor of `bad`, or is the same commit.
        """
        if good == bad:
            raise UsageError(f"good and bad are the same commit {good[:12]}.", "two commits", "check --good and --bad")
        if not self.is_ancestor(good, bad):
            base = self._run("merge-base", good, bad, check=False).stdout.strip()
            raise UsageError(
                f"{good[:12]} is not an ancestor of {bad[:12]}.",
                "a good revision that is an ancestor of the bad one",
                f"give their merge base {base[:12]} as --good if it is good; if it is bad, they never shared a good kernel"
                if base
                else "give revisions with a common history",
            )
        lines = self._run("log", "-z", "--format=%H%x1f%s", "--topo-order", "--reverse", bad, f"^{good}").stdout.split(
            "\0"
        )
        return dict(line.strip("\n").split("\x1f") for line in lines if line)

    def halving(self, bad: str, goods: Sequence[str]) -> list[str]:
        """List the commits reachable from `bad` but from none of `goods`, the one that divides them most evenly first."""
        suspects = self._run("rev-list", "--bisect-all", bad, "--not", *goods).stdout
        return [line.split()[0] for line in suspects.splitlines()]

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

    @contextmanager
    def worktree(self) -> Iterator[Path]:
        """Make a worktree in a temporary folder and remove both at the end. First remove any that killed processes left."""
        lines = self._run("worktree", "list", "--porcelain").stdout.splitlines()
        known = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
        for tree in known[1:]:  # the first is the repository's own
            # Only our own: a linked worktree (its .git is a file) in a folder with our prefix and our lock.
            if tree.parent.name.startswith(_PREFIX) and (tree.parent / LOCK).exists() and not (tree / ".git").is_dir():
                try:
                    lock = lock_folder(tree.parent)
                except UsageError:
                    continue  # its bisection is still running
                self._remove(tree)
                del lock
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        lock, tree = lock_folder(folder), folder / self.path.name
        try:
            self._run("worktree", "add", "--detach", "--no-checkout", str(tree), "HEAD")
            yield tree
        finally:
            self._remove(tree)
            del lock

    def _remove(self, tree: Path) -> None:
        self._run("worktree", "remove", "--force", "--force", str(tree), check=False)
        shutil.rmtree(tree.parent, ignore_errors=True)
        self._run("worktree", "prune", check=False)

    def checkout(self, tree: Path, commit: str) -> None:
        """Check out a commit in a worktree, and leave nothing of the previous one."""
        _run_git(tree, "checkout", "--quiet", "--force", "--detach", commit, settings=self._without_filters)
        _run_git(tree, "clean", "--quiet", "-ff", "-d", "-x")

    def _run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run_git(self.path, *args, check=check)


def _run_git(
    folder: Path, *args: str, check: bool = True, settings: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, without the environment variables that a hook or another git command sets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
    environment["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    done = subprocess.run(
        ["git", *_QUIET, *args], cwd=folder, env=environment, check=False, capture_output=True, text=True,
        errors="replace", stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    if check and done.returncode:
        raise AssayError(
            f"git {args[0]} failed in {folder}: {done.stderr.strip()}", "an intact repository and room on the disk",
            "see git's message; the same command then resumes",
        )  # fmt: skip
    return done
