"""The name by which pip knows assay, its optional dependencies, and the error if they are missing.

``pyproject.toml`` is the only list of an extra's packages. A checkout has that file, which may be newer than the metadata that pip
recorded when it was installed; elsewhere, the metadata of the distribution repeats it.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Literal

from assay.harness.errors import UsageError

Extra = Literal["serve", "ray"]
DISTRIBUTION = "assay-harness"
"""The name for pip. The package index has another project by the name of the command and of the import package."""


def require(extra: Extra, command: str) -> None:
    """Make sure that the packages of an extra and of the base install are installed, before a command starts anything.

    Args:
        extra: "serve" or "ray".
        command: the command that needs them, for the message, such as "assay run".

    Raises:
        UsageError: one of them is missing or too old.
    """
    if missing := sorted({*missing_packages(), *missing_packages(extra)}):
        raise UsageError(
            f"{command} needs packages that are not installed: {', '.join(missing)}.",
            f"the packages of {DISTRIBUTION}[{extra}]",
            install(extra),
        )


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation; pip considers assay itself installed."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def missing_packages(extra: Extra | Literal[""] = "") -> list[str]:
    """Return the packages of an extra that are not installed, sorted; by default those of the base install.

    A package that is too old is listed with the required version and the installed one.
    """
    missing = []
    for name, needed in sorted(_packages(DISTRIBUTION, extra).items()):
        if not _installed(name):
            missing.append(name)
        elif needed and not meets(here := distribution(name).version, needed):
            missing.append(f"{name}{needed} ({here} is installed)")
    return missing


def meets(version: str, needed: str) -> bool:
    """Return True if a version meets a condition, which is as plain as those of assay's packages: >= or ==.

    Parts that are not numbers, such as "a" and "+cu124", are not compared, and other conditions count as met.
    """
    here, least = (list(map(int, re.findall(r"\d+", re.split(r"[^\d.=> ]", text)[0]))) for text in (version, needed))
    here += [0] * (len(least) - len(here))
    return here[: len(least)] == least if "==" in needed else here >= least or ">=" not in needed


def _packages(distribution_: str, extra: str) -> dict[str, str]:
    """Return the distributions that an extra adds, or those of the base install if `extra` is empty, and their versions."""
    packages: dict[str, str] = {}
    # Not packaging.requirements, which takes longer to import than this command's other modules: these lines are assay's own.
    condition = rf"""([^;]*?) *; extra == ["']{extra}["']""" if extra else "([^;]*)"
    for line in _requirements(distribution_):
        if match := re.fullmatch(rf"""([\w.-]+)(?:\[([\w,]+)\])?{condition}""", line):
            name, inner = match[1], match[2]
            packages |= {name: match[3].strip(" ()")} if name != DISTRIBUTION or not inner else {}
            for part in filter(None, (inner or "").split(",")):
                packages |= _packages(name, part)
    return packages


def _requirements(name: str) -> list[str]:
    """Return the requirements of a distribution from its metadata, or none if it is not installed."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if name == DISTRIBUTION and checkout.is_file():
        import tomllib

        project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"].items()
        return [*project["dependencies"], *(f"{line}; extra == '{extra}'" for extra, lines in extras for line in lines)]
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return [name] if name == DISTRIBUTION else []  # this copy has no metadata, so it counts as missing itself


def _installed(name: str) -> bool:
    """Return True if pip has installed a distribution and a module of its name exists, as for all of these."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return importlib.util.find_spec(name.replace("-", "_").lower()) is not None
