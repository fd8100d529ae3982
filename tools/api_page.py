"""Generate docs/api.md from the docstrings of the public API: ``.nox/cpu/bin/python tools/api_page.py``."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from enum import EnumType
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import assay
from assay.harness.schema import RULE

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
milliseconds. Everything else (`assay.harness` and its neighbours) may change with any version, and is not public where a signature
names it. A field without a default is required.
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
    if isinstance(found, EnumType):
        members: dict[str, Any] = dict(found.__members__)
        values = [f"- `{member}` = {value.value}" for member, value in members.items()]
        return [*markdown(inspect.getdoc(found) or ""), "", *values, ""]
    lines = [f"```text\n{_signature(name, found)}\n```\n", *markdown(_doc(found)), ""]
    if inspect.isclass(found):
        if issubclass(found, BaseModel) and "Attributes:" not in (found.__doc__ or ""):
            lines += ["**Fields**", "", *(_field(key, field) for key, field in found.model_fields.items()), ""]
        lines += _members(found)
    return lines


def _doc(found: Any) -> str:
    """The docstring, without the rule that holds for every schema."""
    return (inspect.getdoc(found) or "").replace(f" {RULE}", "")


def _members(found: type) -> list[str]:
    """Properties and methods with a docstring, those of assay's own base classes included."""
    lines: list[str] = []
    mine = [base for base in found.__mro__ if base.__module__.startswith("assay.")]
    members = {name: member for base in reversed(mine) for name, member in vars(base).items() if name[0] != "_"}
    for name, member in members.items():
        member = getattr(member, "wrapped", member)  # pydantic's computed field
        function = member.fget if isinstance(member, property) else member
        if not inspect.isfunction(function):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        given = ", ".join(_parameter(one, None, function) for one in tree.args.args[1:])
        shown = name if isinstance(member, property) else f"{name}({given})"
        returned = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
        lines.append(f"- `{shown}{returned}`: {' '.join((inspect.getdoc(function) or '').split())}")
    return ["**Properties and methods**", "", *lines, ""] if lines else []


def markdown(docstring: str) -> list[str]:
    """A Google-style docstring as Markdown: a list for each of its sections, a code block after a line that ends in "::"."""
    before, marker, after = docstring.partition("::\n\n")
    if marker:
        code = "".join(
            itertools.takewhile(lambda line: line.startswith(("    ", "\n")), after.splitlines(keepends=True))
        )
        block = ["```python", *textwrap.dedent(code).strip().splitlines(), "```", ""]
        return [*markdown(f"{before}:"), "", *block, *markdown(after.removeprefix(code))]
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
    if inspect.isclass(found) and issubclass(found, BaseModel):
        return f"class {name}"
    if inspect.isclass(found) and issubclass(found, BaseException):
        return f"class {name}({', '.join(base.__name__ for base in found.__bases__)})"
    if inspect.isclass(found) and issubclass(found, dict):
        return f"class {name}(TypedDict, total=False)"
    if inspect.isclass(found):
        parameters = inspect.signature(found).parameters.values()
        return _wrapped(f"class {name}", [_attribute(one) for one in parameters], "")
    # From the source, where a default is an expression, not the value that it has in this process.
    (function,) = ast.parse(inspect.getsource(found)).body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    positional = [_parameter(one, default, found) for one, default in zip(args.args, defaults, strict=True)]
    keyword = [_parameter(one, default, found) for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    rest = [f"**{args.kwarg.arg}: {ast.unparse(args.kwarg.annotation)}"] if args.kwarg and args.kwarg.annotation else []
    return _wrapped(name, [*positional, *(["*"] if keyword else []), *keyword, *rest], returned)


def _attribute(one: inspect.Parameter) -> str:
    """A parameter of a dataclass."""
    default = "" if one.default is one.empty else f" = {_quoted(repr(one.default))}"
    return f"{one.name}: {one.annotation}{default}"


class _Inlined(ast.NodeTransformer):
    """Names of a module that are constants or aliases and not public, replaced by what they stand for."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.names.get(node.id)
        if node.id in assay.__all__ or not (isinstance(value, tuple) or get_origin(value) is Literal):
            return node
        return ast.parse(str(value).replace("typing.", ""), mode="eval").body


def _parameter(argument: ast.arg, default: ast.expr | None, function: Any) -> str:
    inlined = _Inlined(function.__globals__)
    text = ast.unparse(inlined.visit(argument))
    return _quoted(f"{text} = {ast.unparse(inlined.visit(default))}" if default else text)


def _quoted(source: str) -> str:
    return source.replace("'", '"')


def _wrapped(before: str, parameters: list[str], after: str) -> str:
    line = f"{before}({', '.join(parameters)}){after}"
    return line if len(line) <= 100 else f"{before}(\n    " + ",\n    ".join(parameters) + f",\n){after}"


def _field(name: str, field: FieldInfo) -> str:
    """One line for a field of a model: its name, type, default and description."""
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    kind = re.sub(r"Annotated\[(\w+), .*?\)\](?=[,\]])", r"\1", kind)
    kind = re.sub(r"(?<!['\w])(?:\w+\.)+(\w+)", r"\1", kind)
    default = "" if field.is_required() else f" = {field.default!r}"
    return f"- `{_quoted(f'{field.alias or name}: {kind}{default}')}`" + (
        f": {field.description}" if field.description else ""
    )


class _Unquoted(ast.NodeTransformer):
    """Types that the source quotes, without their quotes."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node


def _comment_below(name: str) -> str:
    """The value assigned to a constant or an alias, and the docstring below the assignment."""
    module = importlib.import_module(assay._HOME[name])
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            assigned = statement.value
            if isinstance(assigned, ast.Subscript) and ast.unparse(assigned.value) == "Callable":
                assigned = _Unquoted().visit(assigned)
            value = f"`{_quoted(ast.unparse(assigned))}`"
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                return f"{value}\n\n{inspect.cleandoc(str(following.value.value))}"
            return value
    raise LookupError(f"{name} is not assigned in {module.__name__}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
