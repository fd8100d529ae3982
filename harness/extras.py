"""The name by which pip knows assay, its optional dependencies, and the error if they are missing.

``pyproject.toml`` is the only list of the packages of an extra. A checkout has that file, which can be newer than what pip noted of
an installation from it; elsewhere, the metadata of the distribution repeats it.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Literal

from assay.harness.errors import UsageError

Extra = Literal["reports", "serve", "ray"]
DISTRIBUTION = "assay-harness"
"""What pip installs. The package index has another project by the name of the command and of the import package."""
REPOSITORY = "https://github.com/your-organisation/assay"
"""Where pip finds the distribution, since no package index has it. Examples and documentation name it too; a test compares."""


def require(extra: Extra, command: str) -> None:
    """Make sure that the packages of an extra and of the base install are here, before a command starts anything.

    Args:
        extra: "reports", "serve" or "ray".
        command: what needs them, for the message, for example "assay run".

    Raises:
        UsageError: one of them is missing, or too old.
    """
    if missing := sorted({*missing_packages(), *missing_packages(extra)}):
        raise UsageError(
            f"{command} needs packages that are not installed: {', '.join(missing)}.",
            f"the packages of {DISTRIBUTION}[{extra}]",
            install(extra),
        )


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation; pip takes assay itself for installed."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def missing_packages(extra: Extra | Literal[""] = "") -> list[str]:
    """Return the packages of an extra that are not installed, sorted; by default those of the base install.

    Of one that is too old, with the version that is needed and that which is here.
    """
    missing = []
    for name, needed in sorted(_packages(DISTRIBUTION, extra).items()):
        if not _installed(name):
            missing.append(name)
        elif needed and not meets(here := distribution(name).version, needed):
            missing.append(f"{name}{needed} ({here} is here)")
    return missing


def meets(version: str, needed: str) -> bool:
    """Return True if a version meets a condition, which is as plain as those of assay's packages: >= or ==.

    What is no number, such as "a" and "+cu124", is not compared, and other conditions are met.
    """
    here, least = (list(map(int, re.findall(r"\d+", re.split(r"[^\d.=> ]", text)[0]))) for text in (version, needed))
    here += [0] * (len(least) - len(here))
    return here[: len(least)] == least if "==" in needed else here >= least or ">=" not in needed


def _packages(distribution_: str, extra: str) -> dict[str, str]:
    """Return the distributions that an extra of a distribution adds, or those of its base install if it is empty; and versions."""
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
    """Return the requirements of a distribution, as its metadata has them: none of one that is not installed."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if name == DISTRIBUTION and checkout.is_file():
        import tomllib

        project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"].items()
        return [*project["dependencies"], *(f"{line}; extra == '{extra}'" for extra, lines in extras for line in lines)]
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return [name] if name == DISTRIBUTION else []  # nothing is known of what this copy needs: it is missing itself


def _installed(name: str) -> bool:
    """Return True if pip has installed a distribution, and there is a module of its name, as all of these have."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return importlib.util.find_spec(name.replace("-", "_").lower()) is not None
