"""One environment for each profile, shared by all sessions; ``nox -l`` is the menu."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
# SGLang's metadata asks for GPU packages that a CPU cannot use; what it really needs there is in requirements/cpu.txt.
SGLANG_ON_CPU = ("--no-deps", "sglang==0.5.23")

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["accuracy"]


def environment(session: nox.Session, profile: str = "cpu") -> str:
    """The Python of a profile's environment, installed anew only if what it is made of changed."""
    requirements = [ROOT / "requirements" / name for name in (f"{profile}.txt", "test.txt")]
    sources = [ROOT / "pyproject.toml", *requirements]
    made_of = [*(path.read_bytes() for path in sources), repr(SGLANG_ON_CPU).encode(), sys.version.encode()]
    stamp = hashlib.sha256(b"\0".join(made_of)).hexdigest()
    folder = ROOT / ".nox" / profile
    python = str(folder / "bin" / "python")
    if (folder / "stamp").exists() and (folder / "stamp").read_text() == stamp:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(folder), external=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    session.run(*pip, *(flag for path in requirements for flag in ("-r", str(path))), "setuptools>=77", external=True)
    session.run(*pip, "--no-build-isolation", "--editable", str(ROOT), external=True)
    if profile == "cpu":
        # Last, because after any install that follows pip would list all that SGLang misses.
        session.run(*pip, *SGLANG_ON_CPU, external=True)
    (folder / "stamp").write_text(stamp)
    return python


def assay(session: nox.Session, *command: str) -> None:
    """Run a command of assay in the environment of its device; the session's exit code is the command's."""
    flags = [word for flag in session.posargs for word in flag.split("=", 1)]
    on_cuda = any(pair == ("--device", "cuda") for pair in itertools.pairwise(flags))
    python = environment(session, "cuda" if on_cuda else "cpu")
    # Where the user is, not in this folder: paths and a kernel named module:function are meant from there.
    code = subprocess.call([python, "-m", "assay", *command, *session.posargs], cwd=session.invoked_from)
    if code:
        sys.exit(code)  # nox would make a 1, a regression, of any failure


@nox.session(venv_backend="none")
def accuracy(session: nox.Session) -> None:
    """Compare a candidate with a reference and give a verdict; flags after -- go to `assay run`."""
    assay(session, "run")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Look inside: own error by layer, head and condition, and the name of the bug; flags after -- go to `assay diff`."""
    assay(session, "diff")


@nox.session(venv_backend="none")
def latency(session: nox.Session) -> None:
    """Time a candidate against the reference; flags after -- go to `assay bench`."""
    assay(session, "bench")


@nox.session(venv_backend="none")
def gate(session: nox.Session) -> None:
    """Run, hold the result against policy and baselines, and exit with the verdict; flags after -- go to `assay gate`."""
    assay(session, "gate")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests of the instrument, the fast ones first; flags after -- go to pytest."""
    python = environment(session)
    if session.posargs:
        session.run(python, "-m", "pytest", *session.posargs, external=True)
        return
    session.run(python, "-m", "pytest", "-m", "not server", "-n", "2", "--dist", "worksteal", external=True)
    # Not side by side: a server computes on the core of its role, and some tests wait for one to be killed in time.
    session.run(python, "-m", "pytest", "-m", "server", external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and types."""
    python = environment(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(python, "-m", "mypy", external=True)
