"""The document about model features that attention backends honour, ignore or refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import RootModel

from assay.harness.evidence.honours import BackendResult, Honours, Measured, Shape
from assay.harness.sides import Engine, profile_of
from assay.harness.text import counted, listed
from assay.reports.document import MORE, Block, Cell, Code, Document, Items, Line, Row, Section, Table

_STATUS = {
    "ignores": "regression",
    "wrong": "regression",
    "crashes": "inconclusive",
    "refuses": "inconclusive",
    "honours": "pass",
}
_ABOUT = (
    "honours: computes the feature. ignores: computes attention without it, silently. wrong: computes something else. "
    "refuses: raises an error that names it. crashes: fails in another way. not measured: assay cannot run it here."
)


def list_document(
    kernels: Sequence[Mapping[str, Any]], own: Mapping[Engine, Sequence[str]], problems: Mapping[Engine, str]
) -> Document:
    """Build the document of available kernels: the published ones, and each engine's own backends or why there are none."""
    titles = {engine: profile_of(engine).title for engine in own}
    counts = [f"{counted(len(names), 'backend')} of {titles[engine]}" for engine, names in own.items()]
    said = [
        f"{kernel['name']}  {kernel.get('problem') or '{}  {path}  {about}'.format('+'.join(kernel['phases']), **kernel)}"
        for kernel in kernels
    ]
    return Document(
        command="backends",
        title="backends",
        verdict=None,
        headline=f"{', '.join([counted(len(kernels), 'kernel'), *counts])}.",
        body=[
            Line("Kernels (entry-point group assay.kernels):"),
            *(Line(f"  {line}") for line in said),
            *(Line(f"{titles[name]}'s own: {problems.get(name) or ', '.join(names)}") for name, names in own.items()),
        ],
        result=RootModel({"kernels": kernels, **own, "problem": problems.get("sglang", "")}),
    )


def honours_document(result: Honours) -> Document:
    """Build the document: attributes by backend, details behind each cell, backends that cannot run, and tests to copy."""
    ran = [backend for backend in result.backends if not backend.problem]
    silent = {
        (backend.backend, cell.attribute)
        for backend in ran
        for cell in backend.measured
        if cell.state in ("ignores", "wrong")
    }
    attributes = list(dict.fromkeys(cell.attribute for backend in ran for cell in backend.measured))
    table = Table(
        ("asked for", *(backend.backend for backend in ran)),
        [(name, *(_cell(backend, name) for backend in ran)) for name in attributes],
        style="names",
    )
    body: list[Block] = [Line(f"{result.engine}, PyTorch {result.torch}, on {result.device}.")]
    body += [table, Line(_ABOUT, "quiet")] if ran else [Line("No backend can run here.", "empty")]
    if shapes := [f"{backend.backend}: {in_shapes}" for backend in ran if (in_shapes := _in_shapes(backend))]:
        body.append(Section("Measured in", [Items(shapes)], "shapes"))
    if said := [line for backend in ran for line in _said(backend)]:
        body.append(Section("What they computed, or raised", [Items(said)], "said"))
    if absent := [f"{backend.backend}: {backend.problem}" for backend in result.backends if backend.problem]:
        body.append(Section("Cannot run here", [Items(absent)], "absent"))
    tests: dict[tuple[str, str], str] = {}  # the first of each attribute
    for name, cell in ((backend.backend, cell) for backend in ran for cell in backend.measured if cell.test):
        tests.setdefault((name, cell.attribute), cell.test)
    if tests:
        imports = (
            "import torch\n\nfrom assay import Mask, assert_correct\n"
            "from assay.harness.attention.sample_calls import call_of"
        )
        code = Code("\n\n\n".join([imports, *(test.rstrip() for test in tests.values())]), language="python")
        body.append(Section("Tests that fail", [code], "tests"))
    what = "every feature that a layer asks for is computed, or an error says that it is not"
    if silent:
        count = counted(len(silent), "case")
        what = f"in {count}, a feature that a layer asks for is ignored, or computed wrongly, without an error"
    if not ran:
        what = "none of the requested backends can run here"
    return Document(
        command="backends",
        title="What attention backends honour",
        verdict=None,
        headline=f"{counted(len(ran), 'backend')} measured: {what}.",
        screen=_screen(result, attributes),
        body=body,
        exit_code=0 if ran else 3,
        result=result,
    )


def _screen(result: Honours, attributes: Sequence[str]) -> list[Row]:
    """Return a row for each backend that ran, its silent failures first, and one for those that cannot run here."""
    rows = []
    for backend in (each for each in result.backends if not each.problem):
        by_state = {state: [name for name in attributes if backend.state(name) == state] for state in _STATUS}
        said = [f"{state} {listed(names)}" for state, names in by_state.items() if names and state != "honours"]
        honoured, measured = len(by_state["honours"]), sum(map(len, by_state.values()))
        rows.append(Row(backend.backend, "; ".join([*said, f"honours {honoured} of {measured}"])))
    absent = [backend.backend for backend in result.backends if backend.problem]
    return [*rows, *([Row("Cannot run", listed(absent))] if absent else []), MORE]


def _cell(backend: BackendResult, attribute: str) -> Cell:
    """Return the worst state of an attribute, with its phases where they differ."""
    cells = [cell for cell in backend.measured if cell.attribute == attribute]
    state = backend.state(attribute)
    if state is None:
        return Cell("–")
    phases = [cell.phase for cell in cells if cell.state == state]
    return Cell(state, _STATUS.get(state, ""), note="" if len(phases) == len(cells) else ", ".join(phases))


def _said(backend: BackendResult) -> list[str]:
    """Describe the details of the cells, merging phases that say the same."""
    phases: dict[tuple[str, str, str], list[Measured]] = {}
    for cell in backend.measured:
        if cell.state != "honours" and (cell.says or cell.where):
            says = cell.says or cell.state
            words = f"{says}, in {_shape(cell.where)} and not in every shape" if cell.where else says
            phases.setdefault((cell.attribute, cell.state, words), []).append(cell)
    return [
        f"{backend.backend}, {attribute}, {', '.join(cell.phase for cell in cells)}: {words}"
        for (attribute, _, words), cells in phases.items()
    ]


def _shape(shape: Shape) -> str:
    return f"{shape.dtype} at head_dim {shape.head_dim}, up to {shape.keys} keys"


def _in_shapes(backend: BackendResult) -> str:
    """Describe the shapes in which attributes that are not a dtype were measured."""
    most: dict[tuple[int, str, int], Shape] = {}
    for cell in backend.measured:
        computed = cell.error is not None and cell.attribute not in {"bfloat16", "float32", "mla"}
        for place, shape in enumerate(cell.shapes if computed else ()):
            key = place, shape.dtype, shape.head_dim
            most[key] = max(shape, most.get(key, shape), key=lambda each: each.keys)
    return "; ".join(map(_shape, most.values()))
