"""The identity of a kernel's code: hashes of its source files, and of the installed packages that it imports. Runs none of them.

A run that is resumed must not combine answers of one kernel with those of another, and a kernel's name says nothing about its code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from assay.harness.attention.published import is_path, module_of, published, working_folder_searched

_ASSAY = __name__.partition(".")[0]
_PIPS = frozenset({"site-packages", "dist-packages"})
# Bytes of a file that takes long to read.
_LARGE = 1 << 26
# Files other than Python that a kernel may load or compile.
_COMPILED = frozenset({".so", ".pyd", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".hip", ".ptx", ".cubin"})


def source_hashes(name: str) -> dict[str, str]:
    """Hash each part of a kernel's code, by kind.

    Parts are the kernel's module; the modules that it imports directly or indirectly, except installed packages; compiled code
    and its sources in the folders of these modules; files next to them that their code names, such as ``"tuned.json"``,
    ``f"{name}.json"`` or a folder; and the installed packages that any of them imports, by the hash of version and file list. The
    standard library is left out, and so is assay, except the folder of a kernel that ships with it. Imports and names are read
    from the source, so imports inside a function count too.

    Args:
        name: a kernel's published name, or ``module:function``.
    """
    module = module_of(name if is_path(name) else published()[name])
    with working_folder_searched(module):
        return _hashes(module)


def _hashes(module: str) -> dict[str, str]:
    files: dict[str, Path] = {}
    installed: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        top = current.partition(".")[0]
        if current in files or top in installed or top in sys.stdlib_module_names:
            continue
        file = _file_of(current)
        if file is None:
            continue
        if top == _ASSAY:
            # Every kernel imports the contract, and its package imports everything.
            if current != module and (module.rpartition(".")[0] != current.rpartition(".")[0] or module not in files):
                continue
        elif _is_installed(file):
            installed.add(top)
            continue
        else:
            waiting += _parents(current)
        files[current] = file
        waiting += _imported(current, file)
    hashes = {f"module {module}": _hash(file) for module, file in files.items()}
    for folder in {file.parent for file in files.values()}:
        compiled = (file for file in folder.iterdir() if file.suffix in _COMPILED and file.is_file())
        hashes |= {f"file {file.name}": _hash(file) for file in compiled}
    for module, file in files.items():
        if module.partition(".")[0] != _ASSAY:
            hashes |= {f"file {data.relative_to(file.parent)}": _hash(data) for data in _data_files(file)}
    hashes |= {f"package {top}": _installed_hash(top) for top in installed}
    return dict(sorted(hashes.items()))


def _file_of(module: str) -> Path | None:
    """Find the source file of a module without importing it; return None for a built-in module, a namespace, or an invalid name."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    for root in spec.submodule_search_locations or ():
        place = Path(root).joinpath(*rest)
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def _parents(module: str) -> Iterator[str]:
    """Yield the packages that contain a module."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _imported(module: str, file: Path) -> Iterator[str]:
    """Yield modules that a file may import; a name imported from a module may be one of its attributes instead."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _data_files(module: Path) -> Iterator[Path]:
    """Yield the files next to a module that a text in its code names: by path, by their folder, or by their suffix."""
    try:
        nodes = ast.walk(ast.parse(module.read_bytes()))
    except (SyntaxError, ValueError, OSError):
        return
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {text for text in texts if _is_beside(module.parent, text)}
    # The beginning of a name or a pattern in a folder, as in f"configs/E={e}.json", stands for the folder.
    named |= {folder for text in texts - named if _is_beside(module.parent, folder := text.rpartition("/")[0])}
    for text in named:
        place = module.parent / text
        yield from (file for file in ([place] if place.is_file() else place.rglob("*")) if _is_data(file))
    suffixes = {Path(f"_{text}").suffix for text in texts - named if "\n" not in text} - {""}
    yield from (file for file in module.parent.iterdir() if file.suffix in suffixes and _is_data(file))


def _is_beside(folder: Path, text: str) -> bool:
    try:
        place = folder / text
        return bool(text.strip("./ ")) and ".." not in place.parts and place.is_relative_to(folder) and place.exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _is_data(file: Path) -> bool:
    return file.is_file() and file.suffix not in {".py", ".pyc", *_COMPILED}


@cache
def _installed_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple(Path(paths[name]).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib"))


def _is_installed(file: Path) -> bool:
    """Return True if pip installed a file, here or in an environment below this one, like those of Ray's workers."""
    place = file.resolve()
    return not _PIPS.isdisjoint(place.parts) or any(place.is_relative_to(folder) for folder in _installed_folders())


def _installed_hash(top: str) -> str:
    """Hash the versions and file lists of the distributions that contain an installed module."""
    total = hashlib.sha256()
    for installed in _distributions(top):
        total.update(f"{installed.name} {installed.version}\n{installed.read_text('RECORD') or ''}\n".encode())
    return total.hexdigest()


def _distributions(top: str) -> list[Distribution]:
    try:
        return [distribution(top)]
    except PackageNotFoundError:  # its name differs from the module's; searching all distributions takes seconds
        return [distribution(name) for name in sorted(set(packages_distributions().get(top, ())))]


def _hash(file: Path) -> str:
    """Hash the content of a file, or only size and time of a file as large as weights, which would take minutes."""
    status = file.stat()
    large = f"{status.st_size} {status.st_mtime_ns}".encode() if status.st_size > _LARGE else b""
    return hashlib.sha256(large or file.read_bytes()).hexdigest()
