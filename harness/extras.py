"""The name by which pip knows assay, its optional dependencies, and the error if they are missing.

The packages of an extra are those that the distribution's own metadata lists, so ``pyproject.toml`` is the only list.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution, requires
from typing import Literal

from assay.harness.errors import UsageError

Extra = Literal["reports", "serve", "ray"]
DISTRIBUTION = "assay-harness"
"""What pip installs. The package index has another project by the name of the command and of the import package."""
REPOSITORY = "https://github.com/your-organisation/assay"
"""Where pip finds the distribution, since no package index has it. Examples and documentation name it too; a test compares."""


def require(extra: Extra, command: str) -> None:
    """Make sure that the packages of an extra are installed, before a command starts anything.

    Args:
        extra: "reports", "serve" or "ray".
        command: what needs them, for the message, for example "assay run".

    Raises:
        UsageError: one of them is missing.
    """
    if missing := missing_packages(extra):
        raise UsageError(
            f"{command} needs packages that are not installed: {', '.join(missing)}.",
            f"the packages of {DISTRIBUTION}[{extra}]",
            install(extra),
        )


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation; pip takes assay itself for installed."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def missing_packages(extra: Extra | Literal[""] = "") -> list[str]:
    """Return the packages of an extra that are not installed, sorted; by default those of the base install."""
    return [name for name in sorted(_packages(extra)) if not _installed(name)]


def _packages(extra: str) -> set[str]:
    """Return the distributions that an extra adds, or those of the base install if it is empty."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a plain checkout on the path
        return set()
    packages: set[str] = set()
    # Not packaging.requirements, which takes longer to import than this command's other modules: these lines are assay's own.
    condition = rf""".*; extra == ["']{extra}["']""" if extra else "[^;]*"
    for line in lines:
        if match := re.fullmatch(rf"""([\w.-]+)(?:\[([\w,]+)\])?{condition}""", line):
            name, inner = match[1], match[2]
            packages |= (
                {package for part in inner.split(",") for package in _packages(part)}
                if name == DISTRIBUTION
                else {name}
            )
    return packages


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
