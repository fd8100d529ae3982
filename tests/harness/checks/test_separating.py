"""The axis that tells refused calls from computed ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from assay.harness.checks.coverage import Split, separating

Call = dict[str, str]
CALLS = [{"data": w, "cached prefix": p, "head_dim": d} for w, p, d in product(["normal", "peaky"], ["none", "16"], ["64", "128"])]


@pytest.mark.parametrize(
    ("refused", "axis"),
    [
        (lambda call: call["head_dim"] == "128", Split("head_dim", ("128",), ("64",))),
        (lambda call: call["data"] == "peaky", Split("data", ("peaky",), ("normal",))),
        (lambda call: call["head_dim"] == "128" and call["data"] == "peaky", None),
        (lambda call: True, None),
        (lambda call: False, None),
    ],
)
def test_an_axis_is_named_if_all_refused_calls_and_no_others_have_its_values(
    refused: Callable[[Call], bool], axis: Split | None
) -> None:
    assert separating([call for call in CALLS if refused(call)], [call for call in CALLS if not refused(call)]) == axis


def test_an_axis_that_a_kernel_can_declare_comes_first() -> None:
    refused, computed = [{"data": "peaky", "head_dim": "80"}], [{"data": "normal", "head_dim": dim} for dim in ("64", "128")]
    assert separating(refused, computed) == Split("head_dim", ("80",), ("64", "128"))
