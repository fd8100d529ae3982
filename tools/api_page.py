"""Generate docs/api.md from the docstrings of the public API: ``.nox/cpu/bin/python tools/api_page.py``."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import assay
from assay.harness.schema import RULE

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
# Headings, by the first public name under each.
PARTS = {"AttentionCall": "The kernel contract", "check": "Checking a kernel", "run": "Runs and reports"}
HEAD = """# The public API

Generated from the docstrings by `python tools/api_page.py`; a test fails if it is out of date. `help(assay.check)` has the details.

These names are imported from `assay`, typed (`py.typed`), and loaded on first use. Everything else is imported from its module, and
may change with any version.
"""


def page() -> str:
    """The complete page, as Markdown."""
    lines = [HEAD]
    for name in assay.__all__[1:]:
        lines += [f"## {PARTS[name]}\n"] if name in PARTS else []
        found = getattr(assay, name)
        lines += [f"### `{name}`\n", *_entry(name, found), ""]
    return "\n".join(lines)


def _entry(name: str, found: Any) -> Iterator[str]:
    """Yield the lines about one name: its signature, the first paragraph of its docstring, and a line for each part."""
    documented = (inspect.getdoc(found) or "").replace(f" {RULE}", "").replace("``", "`")
    summary, _, rest = documented.partition("\n\n")
    is_model = inspect.isclass(found) and issubclass(found, BaseModel)
    if not is_model:
        yield f"```text\n{_signature(name, found)}\n```\n"
    yield summary.removesuffix("::")
    described = dict(
        re.findall(r"^ {4}(?!(?:Usage|Evidence|Type|Value)Error)(\w+): (.*(?:\n {8}.*)*)", rest, re.MULTILINE)
    )
    if is_model:
        described = {key: described.get(key) or field.description or "" for key, field in found.model_fields.items()}
    if described:
        yield ""
    yield from (f"- `{key}`: {_first_clause(text)}" for key, text in described.items() if text)
    if bare := [f"`{key}`" for key, text in described.items() if not text]:
        yield f"- {', '.join(bare)}"
    methods = [member for member in _members(found) if member] if inspect.isclass(found) else []
    if methods:
        yield f"\nProperties and methods: {', '.join(f'`{method}`' for method in methods)}."


def _first_clause(text: str) -> str:
    return re.split(r"; |(?<=\.) (?=[A-Z])|;$", " ".join(text.split()), maxsplit=1)[0].rstrip(".")


def _members(found: type) -> Iterator[str]:
    """Yield the properties and methods that a class of assay defines itself."""
    for name, member in vars(found).items():
        member = getattr(member, "wrapped", member)  # pydantic's computed field
        is_method = inspect.isfunction(member) or isinstance(member, classmethod)
        if name[0] != "_" and found.__module__.startswith("assay.") and (is_method or isinstance(member, property)):
            yield f"{name}()" if is_method else name


def _signature(name: str, found: Any) -> str:
    if inspect.isclass(found) and issubclass(found, BaseException):
        return f"class {name}({', '.join(base.__name__ for base in found.__bases__)})"
    if inspect.isclass(found):
        parameters = inspect.signature(found).parameters.values()
        given = [f"{one.name}{'' if one.default is one.empty else f' = {one.default!r}'}" for one in parameters]
        return textwrap.fill(f"class {name}({', '.join(given)})", 110, subsequent_indent="    ")
    # From the source, which has a default as an expression instead of its value in this process.
    (function,) = ast.parse(inspect.getsource(found)).body
    assert isinstance(function, ast.FunctionDef)
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return textwrap.fill(f"{name}({ast.unparse(function.args)}){returned}", 110, subsequent_indent="    ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
