"""One environment per profile, shared by all sessions. ``nox -l`` lists the sessions."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
# SGLang's metadata lists packages that need a GPU; requirements/cpu.txt lists those that it imports on a CPU.
SGLANG_ON_CPU = ("--no-deps", "sglang==0.5.23")
# One more than the cores, since some tests only wait for processes. The one test of `tests` that starts servers begins first
# (tests/conftest.py); the many of `tests-all` run one after the other, since each server keeps a core busy.
SIDE_BY_SIDE = ("-n", "3", "--dist", "worksteal")
SLOWEST = "--durations=25"

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["accuracy"]


def environment(session: nox.Session, profile: str = "cpu") -> str:
    """Return the Python of a profile's environment, which is rebuilt only if its requirements changed."""
    # An engine's own environment has no assay, and no tests run in it: assay brings itself into the engine's processes.
    names = ("vllm.txt", "vllm-wheel.txt") if profile == "vllm" else (f"{profile}.txt", "test.txt")
    requirements = [ROOT / "requirements" / name for name in names]
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    what = repr((project["build-system"], project["project"], SGLANG_ON_CPU, sys.version))  # not the settings of tools
    contents = [*(path.read_bytes() for path in requirements), what.encode()]
    stamp = hashlib.sha256(b"\0".join(contents)).hexdigest()
    folder = ROOT / ".nox" / profile
    python = str(folder / "bin" / "python")
    if (folder / "stamp").exists() and (folder / "stamp").read_text() == stamp:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(folder), external=True)
    # Most modules of these packages are never imported; the others are compiled on import, which takes a fraction of the time.
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    if profile == "vllm":
        session.run(*pip, "-r", str(requirements[0]), external=True)
        # Last, for the same reason as SGLang below; pip still complains once.
        session.run(*pip, "--no-deps", "--require-hashes", "-r", str(requirements[1]), external=True)
        (folder / "stamp").write_text(stamp)
        return python
    session.run(*pip, *(flag for path in requirements for flag in ("-r", str(path))), "setuptools>=77", external=True)
    session.run(*pip, "--no-build-isolation", "--editable", f"{ROOT}[all]", external=True)
    if profile == "cpu":
        # Last, since pip would complain about SGLang's missing requirements after every later install.
        session.run(*pip, *SGLANG_ON_CPU, external=True)
    (folder / "stamp").write_text(stamp)
    return python


def assay(session: nox.Session, command: str, *flags: str) -> None:
    """Run a command of assay in the environment of its device; the session's exit code is the command's."""
    if Path(session.invoked_from) / "assay" == ROOT:
        sys.stderr.write(
            f"{ROOT} hides the package assay: Python imports a folder of that name in the working directory instead.\n"
            "Expected: a checkout with another name, or nox called elsewhere\nWhat to do: rename it, for example to .assay\n"
        )
        sys.exit(2)
    words = [word for flag in session.posargs for word in flag.split("=", 1)]
    pairs = set(itertools.pairwise(words))
    on_cuda = ("--device", "cuda") in pairs
    if (
        any((flag, "vllm") in pairs for flag in ("--engine", "--reference-engine", "--candidate-engine"))
        and not on_cuda
    ):
        environment(session, "vllm")  # assay finds it beside its own environment
    python = environment(session, "cuda" if on_cuda else "cpu")
    # Run in the folder where nox was called: relative paths, assay.toml and kernels named module:function refer to it.
    code = subprocess.call([python, "-m", "assay", command, *flags, *session.posargs], cwd=session.invoked_from)
    if code:
        sys.exit(code)  # nox would turn any failure into 1, which means a regression


def pytest(session: nox.Session, *parts: list[str]) -> None:
    """Run pytest once for each part of the tests, or once with the flags given after --."""
    python = environment(session)
    env = {
        # The test processes keep the cores busy: a second BLAS thread would only busy-wait for the first.
        "OPENBLAS_NUM_THREADS": "1",
        # Keep bytecode even if the machine disables it: without it, each process that collects takes twice as long.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    for flags in [session.posargs] if session.posargs else parts:
        session.run(python, "-m", "pytest", *flags, external=True, env=env)


@nox.session(venv_backend="none")
def accuracy(session: nox.Session) -> None:
    """Compare a candidate with a reference and give a verdict; flags after -- go to `assay run`."""
    assay(session, "run")


@nox.session(venv_backend="none")
def diff(session: nox.Session) -> None:
    """Show own error by layer, head and condition, and name the bug; flags after -- go to `assay run`."""
    assay(session, "run", "--suites", "layers,logits")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time a candidate against the reference; flags after -- go to `assay bench`."""
    assay(session, "bench")


@nox.session(venv_backend="none")
def gate(session: nox.Session) -> None:
    """Run, apply the policy, and exit with the verdict; flags after -- go to `assay gate`."""
    assay(session, "gate")


def server_tests() -> list[str]:
    """List the test files that start servers: collecting all files takes as long as starting a server."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.server" in file.read_text(encoding="utf-8")]


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Test the instrument and print the slowest tests; flags after -- go to pytest."""
    pytest(session, ["-m", "not slow", *SIDE_BY_SIDE, SLOWEST])


@nox.session(venv_backend="none", name="tests-all")
def tests_all(session: nox.Session) -> None:
    """Run every test and print the slowest; flags after -- go to pytest."""
    pytest(session, ["-m", "not server", *SIDE_BY_SIDE, SLOWEST], ["-m", "server", SLOWEST, *server_tests()])


@nox.session(venv_backend="none")
def evaluate(session: nox.Session) -> None:
    """Test the benchmarks' bug sets; flags after -- go to pytest. Not part of CI."""
    pytest(session, ["benchmarks/tests", *SIDE_BY_SIDE, SLOWEST])


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, words, types and import contracts."""
    python = environment(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(python, "tools/measure.py", "--lint", external=True)
    session.run(python, "-m", "mypy", external=True)
    session.run(str(Path(python).with_name("lint-imports")), external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation site into site/; flags after -- go to `mkdocs build`."""
    folder, pages = ROOT / ".nox" / "docs", ROOT / ".nox" / "docs" / "pages"
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "venv", str(folder), external=True)
        session.run(python, "-m", "pip", "install", "--quiet", "mkdocs-material==9.*", external=True)
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "ci"))
    for name, page in (("README.md", "index.md"), ("CONTRIBUTING.md", "CONTRIBUTING.md")):
        text = (ROOT / name).read_text(encoding="utf-8")
        (pages / page).write_text(text.replace("](docs/", "]("), encoding="utf-8")
    session.run(python, "-m", "mkdocs", "build", "--quiet", *session.posargs, external=True)
