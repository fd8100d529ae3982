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

Generated from the docstrings by `python tools/api_page.py`; a test fails if it is out of date. `help(assay.check)` says more.

Import these names from `assay`: they are typed (`py.typed`) and loaded when first used. Import everything else from its
module, which may change with any version.
"""
# Fields of a call that a kernel needs, in a table, and those that few need.
FIRST = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale")
RARER = ("phase", "layer", "causal", "lens_q", "lens_k", "prefixes", "features", "stored", "spec")
DTYPES = {"q": "float16, bfloat16 or float32", "k": "as q", "v": "as q", "scale": "a number"}
# Of large classes, the parts that are described; `help` has the others.
SHOWN = {
    "KernelResult": (
        "verdict",
        "findings",
        "calls",
        "failing",
        "worst",
        "missing",
        "smallest",
        "test",
        "measured",
        "to_frame",
    ),
    "RunSpec": ("reference", "candidate", "workload", "policy", "device", "servers", "of"),
    "Report": ("verdict", "checks", "suites", "findings", "reproduce", "failure", "load"),
    "Finding": ("id", "title", "severity", "where", "diagnosis", "operator", "evidence", "reproduce", "sentence"),
}
# Characters of a clause that is not cut at its colon.
LONGEST = 130
# Parameters that a caller in Python rarely passes, or that need no words.
HIDDEN = frozenset(
    "about again call damaged details display gate kernels on_event package prefix reproduce rows tensors".split()
)


def page() -> str:
    """The complete page, as Markdown."""
    lines, seen = [HEAD], set[str]()
    for name in assay.__all__[1:]:
        lines += [f"## {PARTS[name]}\n"] if name in PARTS else []
        found = getattr(assay, name)
        made = _model if name in SHOWN else _call if name == "AttentionCall" else _entry
        lines += [f"### `{name}`\n", *made(name, found, seen), ""]
    return "\n".join(lines)


def _entry(name: str, found: Any, seen: set[str]) -> Iterator[str]:
    """Yield the lines about a function or a small class: its signature, its first paragraph, and its parts."""
    summary, described = _documented(found)
    signature = _signature(name, found)
    yield f"```text\n{signature}\n```\n" if "\n" in signature else f"`{signature}`\n"
    yield summary
    lines = [f"- `{key}`: {_first_clause(text)}" for key, text in described.items() if key not in HIDDEN]
    lines = [line for line in lines if line not in seen]  # parameters that several functions share are described once
    seen.update(lines)
    yield from ["", *lines] if lines else []


def _call(_: str, found: type, __: set[str]) -> Iterator[str]:
    """Yield the lines about a call: a table of the fields that a kernel needs, then those that few need."""
    summary, described = _documented(found)
    described = {name: _of_member(found, name) or described.get(name, "") for name in (*FIRST, *RARER)}
    yield summary
    yield "\n| field | shape | dtype | |\n|---|---|---|---|"
    for name in FIRST:
        text = " ".join(described[name].split())
        shape, dtype = re.search(r"\[.*?\]", text), DTYPES.get(name, "int32")
        if shape:
            text = text.replace(f"int32 {shape[0]}", "").replace(f" {shape[0]}", "")
        about = text.strip(" ,;.")
        yield f"| `{name}` | {shape[0] if shape else ''} | {dtype} | {about} |"
    yield "\nA kernel returns [total_q, num_q_heads, head_dim_v] in the dtype of q, or `Outputs`, and leaves its inputs alone.\n"
    yield "Few kernels need the others:\n"
    yield from (f"- `{name}`: {_first_clause(described[name])}" for name in RARER)


def _model(name: str, found: type[BaseModel], _: set[str]) -> Iterator[str]:
    """Yield the lines about a large class: its parts that matter most, and how many others there are."""
    summary, described = _documented(found)
    yield f"{summary}\n"
    bare = []
    for part in SHOWN[name]:
        text = _of_member(found, part) or described.get(part) or found.model_fields[part].description or ""
        shown = f"`{part}{'()' if inspect.isroutine(getattr(found, part, None)) else ''}`"
        if text:
            yield f"- {shown}: {_first_clause(text)}"
        else:
            bare.append(shown)
    yield from [f"- {', '.join(bare)}"] if bare else []
    others = {key.removesuffix("()") for key in (*found.model_fields, *_members(found))} - {*SHOWN[name]}
    yield f"\n`help(assay.{name})` lists {len(others)} more."


def _documented(found: Any) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the descriptions of its parts."""
    text = (inspect.getdoc(found) or "").replace(f" {RULE}", "").replace("``", "`")
    summary, _, rest = text.partition("\n\n")
    parts = re.findall(r"^ {4}(?!(?:Usage|Evidence|Type|Value)Error)(\w+): (.*(?:\n {8}.*)*)", rest, re.MULTILINE)
    return summary.removesuffix("::"), dict(parts)


def _of_member(found: type, name: str) -> str:
    """Return the first paragraph of a property's or method's docstring as a clause, or an empty string for a field."""
    member = vars(found).get(name)
    member = getattr(member, "wrapped", member)  # pydantic's computed field
    if not (isinstance(member, property | classmethod) or inspect.isfunction(member)):
        return ""
    text = (inspect.getdoc(member) or "").partition("\n\n")[0].strip().replace("``", "`").removeprefix("Return ")
    return f"{text[:1].lower()}{text[1:]}".rstrip(".:")


def _first_clause(text: str) -> str:
    clause = re.split(r"; |(?<=\.) (?=[A-Z])|;$", " ".join(text.split()), maxsplit=1)[0].rstrip(".")
    return clause if len(clause) <= LONGEST else clause.split(": ")[0]


def _members(found: type) -> Iterator[str]:
    """Yield the properties and methods that a class of assay defines itself."""
    for name, member in vars(found).items():
        member = getattr(member, "wrapped", member)  # pydantic's computed field
        is_method = inspect.isfunction(member) or isinstance(member, classmethod)
        if name[0] != "_" and found.__module__.startswith("assay.") and (is_method or isinstance(member, property)):
            yield f"{name}()" if is_method else name


def _signature(name: str, found: Any) -> str:
    """The names of parameters with their defaults; types are in the package."""
    if inspect.isclass(found) and issubclass(found, BaseException):
        return f"class {name}({', '.join(base.__name__ for base in found.__bases__)})"
    if inspect.isclass(found):
        parameters = inspect.signature(found).parameters.values()
        given = [f"{one.name}{'' if one.default is one.empty else f'={one.default!r}'}" for one in parameters]
        return textwrap.fill(f"class {name}({', '.join(given)})", 110, subsequent_indent="    ")
    # From the source, which has a default as an expression instead of its value in this process.
    (function,) = ast.parse(inspect.getsource(found)).body
    assert isinstance(function, ast.FunctionDef)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return textwrap.fill(f"{name}({ast.unparse(function.args)})", 110, subsequent_indent="    ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
