from __future__ import annotations

import ast
import importlib
import math
from pathlib import Path

import pytest
import torch

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.kernels import declaration, load
from assay.harness.attention.matrix import cases
from assay.harness.bugs.family import BY_ID, FAMILY, KIND_TITLES
from assay.harness.bugs.faults import rounded_oracle
from assay.harness.errors import UsageError
from assay.harness.explain import broken
from assay.harness.explain.examples import example
from assay.harness.explain.other_findings import OTHER_KIND
from assay.harness.explain.pages import BEYOND_MATRIX, ids_of, page, titles
from assay.harness.judge import layer_verdict
from assay.harness.localize.kernel_runs import measure
from assay.harness.offline.check import check
from assay.harness.offline.kernel_matrix import matrix_of
from assay.harness.picture import WRONG
from assay.harness.verdict import OPERATOR

ROOT = Path(__file__).parents[3]
ROOMS = ("bisect", "judge", "localize", "offline", "readout")


def given_ids() -> set[str]:
    """Every id that the code gives to a finding as a constant."""
    found: set[str] = set()
    for path in (path for room in ROOMS for path in (ROOT / "harness" / room).rglob("*.py")):
        module = f"assay.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding":
                [id_] = [keyword.value for keyword in call.keywords if keyword.arg == "id"]
                found |= {ast.literal_eval(one) for one in ast.walk(id_) if isinstance(one, ast.Constant) and one.value}
                names = {one.id for one in ast.walk(id_) if isinstance(one, ast.Name) and one.id.isupper()}
                found |= {getattr(importlib.import_module(module), name) for name in names}
    return found


def test_every_finding_has_a_page() -> None:
    ids = given_ids()
    assert {"accuracy", "contract-broken", "unexplained", "impossible-speed", "noise-missing"} <= ids
    ids |= {layer_verdict.OUT_OF_BOUNDS, layer_verdict.GAIN, layer_verdict.TOO_QUIET, layer_verdict.WRONG_REFERENCE, OPERATOR}
    assert not ids - set(titles())
    for id_ in ids:
        found = page(id_)
        assert (found.id, found.kind) == (id_, OTHER_KIND)
        assert found.about.endswith(".")
        assert found.do.endswith(".")


def test_kinds_are_those_of_the_hypotheses() -> None:
    assert list(KIND_TITLES) == list(dict.fromkeys(one.kind for one in FAMILY))
    assert [id_ for kind in KIND_TITLES for id_ in ids_of(kind)] == list(BY_ID)


@pytest.mark.parametrize("id_", BY_ID)
def test_the_picture_is_the_bug(id_: str) -> None:
    found = page(id_)
    assert found.picture is not None
    cells = set("".join(found.picture.cells))
    assert cells & set(WRONG) or set(found.picture.rows) - {"read"}, "nothing differs"
    assert found.error is not None
    assert found.error > 1e-4
    assert math.isinf(found.error) == (BY_ID[id_].kind == "overflow" or id_ == "later-sequences-unwritten")
    if found.kind == "mask":
        expected = {"mask-top-left": "o", "mask-one-key-too-many": "!", "mask-one-key-too-few": "o", "mask-missing": "!"}
        assert cells & set(WRONG) == {expected[id_]}


@pytest.mark.slow
def test_the_command_runs_a_kernel_whose_bug_shows_there() -> None:
    def smallest_first(kernel: Kernel) -> list[AttentionCall]:
        declared = declaration(kernel)
        calls = [case.make() for case in cases(declared=declared, head_dims=declared.head_dims)]
        return sorted(calls, key=lambda call: (call.q.dtype != torch.float32, call.q.shape[0] * call.k.shape[0]))

    plain, hidden = smallest_first(rounded_oracle), set()
    for id_, hypothesis in BY_ID.items():
        command = page(id_).command
        if id_ in BEYOND_MATRIX:
            assert command == "assay replay PACK --candidate mine:forward"
            kernel = getattr(broken, id_.replace("-", "_"))
        else:
            kernel = load(command.removeprefix("assay check "))
        calls = smallest_first(kernel) if declaration(kernel).features or declaration(kernel).head_dims_v else plain
        if not any(hypothesis.compute(call) is not None and measure(call, kernel(call)).fails for call in calls):
            hidden.add(id_)
    assert hidden == BEYOND_MATRIX


OF_V = [bug.id for bug in FAMILY if (call := example(bug)).v.shape[2] != call.q.shape[2] and not call.features]
"""Bugs that show where V has a head dim of its own."""


@pytest.mark.parametrize("id_", OF_V)
def test_a_bug_of_another_head_dim_of_v_is_checked_on_calls_that_have_one(id_: str) -> None:
    name = page(id_).command.removeprefix("assay check ")
    small = [case for case in matrix_of(declaration(load(name)), dtypes=["float32"]) if case.make().k.shape[0] <= 64]
    assert [finding.id for finding in check(name, cases=small[:8], read_out=0).findings] == [id_]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("mask-topleft", "mask-top-left"), ("causal mask top left", "mask-top-left"), ("unexplaned", "unexplained")],
)
def test_a_typo_is_recognised(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        page(typed)
    with pytest.raises(UsageError, match="assay explain lists them"):
        page("zzzzzz")
