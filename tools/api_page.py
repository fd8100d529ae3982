"""Generate docs/api.md from the docstrings of the public API: ``python tools/api_page.py``."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from enum import EnumType
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import assay

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
PARTS = {
    "The kernel contract": "AttentionCall",
    "Checking a kernel": "check",
    "Runs and reports": "run",
    "Errors": "ExitCode",
}
"""Headings, each with the first public name under it."""
HEAD = """# The public API

Generated from the docstrings by `python tools/api_page.py`; a test fails if it is out of date.

Everything here is imported from `assay` and typed (`py.typed`). A name is loaded when it is first used, so `import assay` takes
milliseconds. Everything else (`assay.harness` and its neighbours) may change with any version.
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def page() -> str:
    """The complete page, as Markdown."""
    heading_of = {first: heading for heading, first in PARTS.items()}
    lines = [HEAD]
    for name in assay.__all__:
        if name == "__version__":
            continue
        if name in heading_of:
            lines.append(f"## {heading_of[name]}\n")
        lines.append(f"### `{name}`\n")
        lines += entry(name, getattr(assay, name))
    return "\n".join(lines)


def entry(name: str, found: Any) -> list[str]:
    """The lines of the page about one name."""
    if not (inspect.isfunction(found) or inspect.isclass(found)):
        return [f"{_comment_below(name)}\n"]
    lines = [] if isinstance(found, EnumType) else [f"```text\n{_signature(name, found)}\n```\n"]
    lines += [*markdown(inspect.getdoc(found) or ""), ""]
    if isinstance(found, EnumType):
        members: dict[str, Any] = dict(found.__members__)
        lines += [*(f"- `{member}` = {value.value}" for member, value in members.items()), ""]
    elif inspect.isclass(found) and issubclass(found, BaseModel) and "Attributes:" not in (found.__doc__ or ""):
        lines += [*(_field(key, field) for key, field in found.model_fields.items()), ""]
    return lines


def markdown(docstring: str) -> list[str]:
    """A Google-style docstring as Markdown: a list for each of its sections."""
    lines: list[str] = []
    for line in docstring.replace("``", "`").splitlines():
        section = line.removesuffix(":")
        if line.endswith(":") and section in _SECTIONS:
            lines += [f"**{section}**", ""]
        elif item := re.match(r" {4}(\S[^:]*): (.*)", line):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif line.startswith("    "):
            lines.append(line.strip() if not lines or not lines[-1].startswith(("- ", "  ")) else f"  {line.strip()}")
        else:
            lines.append(line)
    return lines


def _signature(name: str, found: Any) -> str:
    if inspect.isclass(found) and issubclass(found, (BaseModel, BaseException)):
        return f"class {name}({', '.join(base.__name__ for base in found.__bases__)})"
    if inspect.isclass(found):
        return _wrapped(
            f"class {name}", [str(one).replace("'", "") for one in inspect.signature(found).parameters.values()], ""
        )
    # From the source, where a default is an expression, not the value that it has in this process.
    (function,) = ast.parse(inspect.getsource(found)).body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    positional = [_parameter(one, default) for one, default in zip(args.args, defaults, strict=True)]
    keyword = [_parameter(one, default) for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return _wrapped(name, [*positional, *(["*"] if keyword else []), *keyword], returned)


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return (ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")).replace("'", '"')


def _wrapped(before: str, parameters: list[str], after: str) -> str:
    line = f"{before}({', '.join(parameters)}){after}"
    return line if len(line) <= 100 else f"{before}(\n    " + ",\n    ".join(parameters) + f",\n){after}"


def _field(name: str, field: Any) -> str:
    """One line for a field of a model: its name, type and description."""
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    kind = re.sub(r"Annotated\[(\w+), .*?\)\](?=[,\]])", r"\1", kind)
    kind = re.sub(r"(?<!['\w])(?:\w+\.)+(\w+)", r"\1", kind).replace("'", '"')
    return f"- `{field.alias or name}` ({kind})" + (f": {field.description}" if field.description else "")


def _comment_below(name: str) -> str:
    """The value assigned to a constant or an alias, and the docstring below the assignment."""
    module = importlib.import_module(assay._HOME[name])
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            value = "`{}`".format(ast.unparse(statement.value).replace("'", '"'))
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                return f"{value}\n\n{inspect.cleandoc(str(following.value.value))}"
            return value
    raise LookupError(f"{name} is not assigned in {module.__name__}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
