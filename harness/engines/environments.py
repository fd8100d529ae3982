"""The Python of a side: another environment's interpreter, an environment with packages laid over it, and assay on its path.

An overlay is a virtual environment of the same base Python that sees everything of its parent, after the requested packages.
Only these are installed, without their dependencies, so that two sides differ in nothing else. Overlays are cached by content.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock

from assay.harness.errors import UsageError
from assay.harness.extras import DISTRIBUTION, meets
from assay.harness.schema import Record
from assay.harness.sides import Engine, EngineProfile, Side, hide, profile_of
from assay.harness.text import counted, few

# Disk space of all overlays; the least recently used go first. Those of the last day stay: a server may run there.
_BUDGET_BYTES, _IN_USE_S = 20 * 2**30, 24 * 3600.0
_INSTALL_S, _LOOK_S = 3600.0, 120.0
_TAIL_LINES = 8
_MIN_PYTHON = (3, 11)
# Packages that assay's own modules import inside a server.
_INSIDE = ("numpy", "pydantic", "safetensors", "torch")
# The form "transformers @ /envs/new/bin/python": the package as another environment has it.
_OF_ANOTHER = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*@\s*([/~.][^@]*)")
# The entry points by which each engine loads assay's plugin.
_PLUGINS = {
    "sglang.srt.plugins": "assay.harness.engines.sglang.plugin:register",
    "vllm.general_plugins": "assay.harness.engines.vllm.plugin:register",
}
_RECORD, _PARENT = "environment.json", "parent.pth"
_LOOK = """
import importlib.metadata as metadata, importlib.util as util, json, os, re, site, sys
places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
seen = {}
for each in metadata.distributions():
    if name := each.metadata["Name"]:
        seen.setdefault(re.sub(r"[-_.]+", "-", name).lower(), [each.version, str(each._path)])
print(json.dumps({
    "version": sys.version_info[:3], "base": getattr(sys, "_base_executable", sys.executable), "prefix": sys.prefix,
    "places": [place for place in places if os.path.isdir(place)], "packages": seen,
    "missing": [name for name in sys.argv[1:] if util.find_spec(name) is None],
}))
"""
# Prints those modules among the arguments that do not come from the overlay.
_SHADOWS = """
import importlib.util as util, sys
for name in sys.argv[2:]:
    spec = util.find_spec(name)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    if not any(place and place.startswith(sys.argv[1]) for place in places):
        print(name, "comes from", next(filter(None, places), "nowhere"))
"""


def normalised(name: str) -> str:
    """Return the name of a distribution in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_of(requirement: str) -> str:
    """Return the normalised name of the distribution that a requirement, or the path of a wheel, names."""
    name = Path(requirement).name.partition("-")[0] if requirement.endswith(".whl") else requirement
    named = re.match(r"\s*([A-Za-z0-9][\w.-]*)", name)
    return normalised(named[1]) if named else ""


class Interpreter(Record):
    """A Python, and the packages that it sees.

    Attributes:
        path: its executable, as named by the user.
        version: for example (3, 11, 7).
        base: the executable of the Python that its environment was made with.
        prefix: folder of its environment.
        places: folders of its packages.
        packages: version and metadata folder of each distribution, by its normalised name.
        missing: modules that it lacks and that assay needs inside a server.
    """

    path: str
    version: tuple[int, int, int]
    base: str
    prefix: str
    places: tuple[str, ...]
    packages: dict[str, tuple[str, str]]
    missing: tuple[str, ...]

    def version_of(self, name: str) -> str:
        """Return the version of a package, or an empty string if it is not installed."""
        return self.packages.get(name, ("", ""))[0]


class _Overlay(Record):
    """The record of a complete overlay: the requested packages, and its size."""

    packages: tuple[str, ...]
    size: int


@cache
def interpreter(path: str) -> Interpreter:
    """Look at a Python: its version and its packages.

    Args:
        path: its executable, or an empty string for the one that runs assay.

    Raises:
        UsageError: it does not run.
    """
    python = path or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, *_INSIDE], env=_environment(python),
            capture_output=True, text=True, timeout=_LOOK_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        problem = done.stderr.strip().splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
        if done.returncode == 0:
            return Interpreter(path=python, **json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = [str(error)]
    raise UsageError(f"{python} does not run: {problem[0]}", "the path of a Python", "check --candidate-python")


def _environment(python: str) -> dict[str, str]:
    """Return the environment variables in which a Python is looked at."""
    path = [*_laid_over(Path(python).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **({"PYTHONPATH": ":".join(path)} if path else {})}


def check_interpreter(python: str, engine: EngineProfile) -> Interpreter:
    """Check that a Python can serve: its version, its engine, and the packages that assay imports inside a server.

    Args:
        python: its executable.
        engine: the engine that it starts.

    Raises:
        UsageError: it cannot.
    """
    looked = interpreter(python)
    if looked.version < _MIN_PYTHON:
        number = ".".join(map(str, looked.version))
        raise UsageError(f"{python} is Python {number}.", "Python 3.11 or newer", "name another interpreter")
    name, oldest = engine.distributions[0], engine.oldest
    here = next(filter(None, map(looked.version_of, engine.distributions)), "")
    if here and not meets(here, f">={oldest}"):
        raise UsageError(
            f"{name} {here} of {python} is too old: it loads no plugins, so assay can neither count its calls nor compare its "
            "layers and log-probabilities.",
            f"{name} {oldest} or newer",
            f"install {name} {oldest} there, or start that server yourself and name its URL",
        )
    if missing := [*looked.missing, *([] if here or _python_path_has(name) else [name])]:
        raise UsageError(
            f"{python} lacks {', '.join(missing)}.",
            "the engine, and the packages that assay imports inside a server",
            "install them there, or name another interpreter",
        )
    return looked


def python_path(python: str, inherited: str = "") -> str:
    """Return PYTHONPATH for a side's Python: packages laid over others, then this very assay, then what was inherited.

    A folder of the inherited PYTHONPATH, such as an engine's checkout, would otherwise hide packages that were laid over it.
    """
    return ":".join(filter(None, [*_laid_over(Path(python).parent.parent), str(room()), inherited]))


def _laid_over(folder: Path) -> list[str]:
    """Return the folder of an overlay's own packages; none for any other environment."""
    return [str(place) for place in folder.glob("lib/python*/site-packages") if (place / _PARENT).exists()]


def _python_path_has(module: str) -> bool:
    """Return True if a folder of PYTHONPATH has a module, for example an engine's checkout."""
    return any((Path(place) / module).is_dir() for place in os.environ.get("PYTHONPATH", "").split(":") if place)


def room() -> Path:
    """Return a folder for PYTHONPATH that holds only assay: its package and its entry points.

    An engine there loads the plugin of this very assay, whether or not its environment has an assay.
    """
    running = sys.modules["assay"]
    package, version, entries = Path(str(running.__file__)).parent.resolve(), running.__version__, _entry_points()
    key = hashlib.sha256(f"{package}\n{version}\n{entries}".encode()).hexdigest()[:16]
    folder = _cache_folder() / "rooms" / key
    if not folder.exists():
        with _made_whole(folder) as made:
            (made / "assay").symlink_to(package, target_is_directory=True)
            info = made / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n")
            (info / "entry_points.txt").write_text(entries)
    return folder


def _entry_points() -> str:
    """Return the entry points of the running assay, in the form of ``entry_points.txt``, with the plugins of all engines."""
    try:
        own = importlib.metadata.distribution(DISTRIBUTION).read_text("entry_points.txt") or ""
    except importlib.metadata.PackageNotFoundError:  # a clone on the path; a server needs only its plugin
        own = ""
    added = [f"\n[{group}]\nassay = {plugin}\n" for group, plugin in _PLUGINS.items() if f"[{group}]" not in own]
    return own + "".join(added)


def python_of(side: Side, say: Callable[[str], None] = lambda line: None) -> str:
    """Return the Python that starts a side's engine; make the overlay of its packages first, unless it is cached.

    Args:
        side: the side.
        say: receives a line for each overlay that is made, and for each requirement of its packages that is not met.

    Returns:
        The path of an executable, or an empty string for the one that runs assay.

    Raises:
        UsageError: the interpreter does not run, or a package cannot be installed.
    """
    own = side.interpreter or _beside(side.engine)
    if not side.packages:
        return own
    parent = interpreter(own)
    asked = tuple(hide("packages", package) for package in side.packages)
    folder = _cache_folder() / "environments" / _key(parent, side.packages)
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / _RECORD).exists():
            say(f"Making an environment with {few(asked, 3)}, cached as {folder}.")
            with _made_whole(folder) as made:
                _overlay(made, parent, side.packages)
                size = sum(file.lstat().st_size for file in made.rglob("*") if not file.is_dir())
                (made / _RECORD).write_text(_Overlay(packages=asked, size=size).model_dump_json())
            _keep_within(folder.parent, _BUDGET_BYTES)
        os.utime(folder / _RECORD)
    for line in unmet(interpreter(str(python)), _own(folder), parent):
        say(line)
    return str(python)


def _beside(engine: Engine) -> str:
    """Return the Python of the environment that is named like an engine and lies beside the running one, which lacks the engine.

    ``.nox/vllm`` beside ``.nox/cpu``: two engines may need other versions of the same packages.
    """
    python = Path(sys.prefix).parent / engine / "bin" / "python"
    here = any(map(interpreter("").version_of, profile_of(engine).distributions)) if python.exists() else True
    return "" if here else str(python)


def _key(parent: Interpreter, packages: Sequence[str]) -> str:
    """Return the key of an overlay: it changes with its parent's packages and with the content of local ones."""
    content = [parent.path, parent.prefix, str(parent.version), *map(str, sorted(parent.packages.items()))]
    for package in packages:
        content.append(package)
        if other := _OF_ANOTHER.fullmatch(package):
            content.append(digest_of(_metadata(other[1], other[2])))
        elif (file := Path(package).expanduser()).is_file():
            content.append(hashlib.sha256(file.read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:20]


def digest_of(metadata: Path) -> str:
    """Return a digest of an installed distribution: of the text of its modules, and of the sizes of its other files."""
    digest = hashlib.sha256()
    for name, file in sorted(_files(metadata)):
        digest.update(f"{name} {file.stat().st_size}\n".encode())
        if file.suffix == ".py":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(metadata: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that a distribution has installed next to its metadata, except scripts, by relative path."""
    for file in importlib.metadata.PathDistribution(metadata).files or ():
        path = metadata.parent / file
        if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
            yield str(file), path


def _metadata(name: str, python: str) -> Path:
    """Return the metadata folder of a package in another environment."""
    other = interpreter(str(Path(python.strip()).expanduser()))
    if not (place := other.packages.get(normalised(name))):
        raise UsageError(f"{other.path} has no {name}.", "a package that is installed there", "check the name")
    return Path(place[1])


def _overlay(folder: Path, parent: Interpreter, packages: Sequence[str]) -> None:
    """Make an overlay in an empty folder.

    Raises:
        UsageError: a package cannot be installed, or is shadowed by something else.
    """
    _run([parent.base, "-m", "venv", "--without-pip", str(folder)], f"{parent.base} makes no virtual environment", "")
    python, (place,) = folder / "bin" / "python", folder.glob("lib/python*/site-packages")
    # `addsitedir` reads the parent's own .pth files too, and appends: what is installed here comes first.
    (place / _PARENT).write_text("".join(f"import site; site.addsitedir({each!r})\n" for each in parent.places))
    others = [match for package in packages if (match := _OF_ANOTHER.fullmatch(package))]
    for other in others:
        _copy(_metadata(other[1], other[2]), place)
    by_pip = [package for package in packages if not _OF_ANOTHER.fullmatch(package)]
    if by_pip:
        pip = (
            [str(python), "-m", "pip"]
            if "pip" in parent.packages
            else [sys.executable, "-m", "pip", "--python", str(python)]
        )
        # Not taken for installed: a wheel may have the version that the parent has, and other content.
        options = [
            "--no-deps",
            "--ignore-installed",
            "--no-compile",
            "--no-input",
            "--disable-pip-version-check",
            "--progress-bar=off",
        ]
        files = [
            str(file.resolve()) if (file := Path(package).expanduser()).is_file() else package for package in by_pip
        ]
        said = ", ".join(hide("packages", package) for package in by_pip)
        do = "check the names and versions, and that an index or the files can be reached"
        _run([*pip, "install", *options, *files], f"pip cannot install {said}", do)
    own = _own(folder)
    modules = sorted({module for metadata in own for module in _modules(metadata)})
    shadowed = _run([str(python), "-c", _SHADOWS, str(folder), *modules], f"{python} does not run", "")
    if shadowed.strip() or not own:
        raise UsageError(
            f"{shadowed.strip().splitlines()[0] if own else 'Nothing was installed'}.",
            "the requested packages, before all others",
            "remove it from PYTHONPATH, where it comes first" if own else "name a package",
        )


def _copy(metadata: Path, place: Path) -> None:
    """Copy an installed distribution from another environment, as links to its files where the disk allows it.

    Raises:
        UsageError: it is installed in place, like an editable one.
    """
    files = dict(_files(metadata))
    if not any(Path(name).parent != Path(metadata.name) and not name.endswith(".pth") for name in files):
        raise UsageError(
            f"{metadata.name} in {metadata.parent} has no files of modules.",
            "a package that was installed from a wheel",
            "install it there without --editable, or name a wheel",
        )
    for name, file in files.items():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:  # on another disk
            shutil.copy2(file, target)


def _own(folder: Path) -> list[Path]:
    """List the metadata of the overlay's own distributions."""
    return sorted(folder.glob("lib/python*/site-packages/*.dist-info"))


def _modules(metadata: Path) -> set[str]:
    """Return the top-level modules of an installed distribution."""
    tops = {Path(name).parts[0] for name, _ in _files(metadata)}
    names = {top.partition(".")[0] for top in tops if not top.endswith((".dist-info", ".pth", ".data", ".libs"))}
    return {name for name in names if name.isidentifier()}


def unmet(looked: Interpreter, own: Sequence[Path], parent: Interpreter) -> list[str]:
    """List requirements of packages that their environment does not meet, a sentence for each package.

    Requirements that the parent does not meet for its version of the package either are counted: an engine's metadata lists dozens
    of packages for devices that this machine may lack.
    """
    lines = []
    for distribution in map(importlib.metadata.PathDistribution, own):
        name, lacking = distribution.metadata["Name"], _lacking(distribution, looked)
        version, place = parent.packages.get(normalised(name), ("", ""))
        before = _lacking(importlib.metadata.PathDistribution(Path(place)), parent) if place else {}
        new = [said for needed, said in lacking.items() if needed not in before]
        old = f"{counted(len(lacking) - len(new), 'requirement')} that {version} has unmet here too" * (
            len(new) < len(lacking)
        )
        if said := [*([few(new, 3)] if new else []), *([old] if old else [])]:
            lines.append(f"{name} {distribution.version} requires {', and '.join(said)}.")
    return lines


def _lacking(distribution: importlib.metadata.Distribution, looked: Interpreter) -> dict[str, str]:
    """Return the requirements of a distribution that an environment does not meet, by package."""
    from packaging.requirements import InvalidRequirement, Requirement

    lacking = {}
    for text in distribution.requires or ():
        with suppress(InvalidRequirement):
            needed = Requirement(text)
            name, here = normalised(needed.name), looked.version_of(normalised(needed.name))
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            if not here or not needed.specifier.contains(here, prereleases=True):
                lacking[name] = f"{needed.name}{needed.specifier} ({here or 'none'} is here)"
    return lacking


def _keep_within(root: Path, budget: int) -> None:
    """Remove the least recently used overlays while all of them together exceed a budget, in bytes."""
    used = sorted(((record.stat().st_mtime, record.parent) for record in root.glob(f"*/{_RECORD}")), reverse=True)
    total = 0
    for when, folder in used:
        total += _Overlay.model_validate_json((folder / _RECORD).read_text()).size
        if total > budget and time.time() - when > _IN_USE_S:
            (folder / _RECORD).unlink()  # first: a half-removed overlay must not be used
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """Make a folder under another name, so that it appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        yield made
        with suppress(OSError):  # another process was faster
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _run(command: Sequence[str], problem: str, do: str) -> str:
    """Run a command and return its output.

    Raises:
        UsageError: it failed; the message ends with its last lines.
    """
    try:
        done = subprocess.run(
            command, env=_environment(command[0]), capture_output=True, text=True, timeout=_INSTALL_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout
        lines = [hide("packages", line) for line in (done.stdout + done.stderr).strip().splitlines()[-_TAIL_LINES:]]
    except (OSError, subprocess.TimeoutExpired) as error:
        lines = [str(error)]
    last = lines[-1] if lines else "it printed nothing"
    raise UsageError(
        f"{problem}: {last}",
        "packages that can be installed",
        do or "name another interpreter",
        details="\n".join(lines[:-1]),
    )


def _cache_folder() -> Path:
    """Return assay's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
