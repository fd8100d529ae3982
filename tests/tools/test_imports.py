"""Benchmarks, tools and examples run by hand: a name of assay that has moved would break them unseen."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "tools", "examples", "docs") for path in (ROOT / folder).rglob("*.py"))


def test_there_are_scripts_to_look_at() -> None:
    """Without any, the test below would be skipped."""
    assert {path.relative_to(ROOT).parts[0] for path in SCRIPTS} == {"benchmarks", "tools", "examples", "docs"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_a_script_imports_from_assay_exists(script: Path) -> None:
    """Also what is imported within a function."""
    missing = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "assay":
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not _exists(str(node.module), alias.name)]
    assert missing == []


def _exists(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("assay"):
            raise
        return False
    return True
