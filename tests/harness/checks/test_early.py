from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix import Case, cases
from assay.harness.checks.early import _FEWEST, _SHARE, clearly_wrong, in_order
from assay.harness.localize.kernel_runs import CallResult


@cache
def made() -> list[tuple[Case, AttentionCall]]:
    return [(case, case.make()) for case in cases()]


@cache
def order() -> list[Case]:
    case_of = {id(call): case for case, call in made()}
    return [case_of[id(call)] for call in in_order(made())]


@cache
def first() -> list[Case]:
    return order()[: int(max(_FEWEST, _SHARE * len(order()))) + 1]


def results(some: list[Case], wrong: Callable[[dict[str, str]], float]) -> list[CallResult]:
    """What a kernel computed whose own error is so many times its bound."""
    found = []
    for case in some:
        ratio, call = wrong(case.condition), SimpleNamespace(phase=case.condition["phase"])
        call.q = SimpleNamespace(dtype=case.condition["dtype"])
        found.append(cast(CallResult, SimpleNamespace(fails=ratio > 1, worst=ratio, call=call, lse_errors=None)))
    return found


def made_until(wrong: Callable[[dict[str, str]], float]) -> int:
    """How many calls are made of a kernel."""
    every = results(order(), wrong)
    begin = len(first()) - 2  # fewer are never enough
    assert not clearly_wrong(every[:begin], begin, len(order()))
    return next((n for n in range(begin, len(every) + 1, 4) if clearly_wrong(every[:n], n, len(order()))), len(every))


def test_each_call_is_made_once_and_those_first_that_show_much_and_cost_little() -> None:
    assert sorted(case.name for case in order()) == sorted(case.name for case, _ in made())
    assert len({(case.condition["phase"], case.condition["dtype"]) for case in order()[:12]}) == 6
    scores = {id(case): scored(call) for case, call in made()}
    assert sum(scores[id(case)] for case in first()) < 0.1 * sum(scores.values())
    for axis in ("heads", "head_dim", "inputs", "autograd", "cached prefix"):
        usual = {case.condition[axis] for case in order() if not case.beyond}
        assert usual <= {case.condition[axis] for case in first()}


def scored(call: AttentionCall) -> int:
    pairs = zip(call.lens_q, call.prefixes, strict=True)
    return call.q.shape[1] * sum(new * (new + cached) for new, cached in pairs)


@pytest.mark.parametrize(
    ("wrong", "early"),
    [
        (lambda c: 1e3, True),
        (lambda c: 1e3 if c["cached prefix"] != "none" else 0.5, True),
        (lambda c: 1e3 if c["dtype"] == "float16" else 0.5, True),  # experiments try the others
        (lambda c: 1e3 if c["phase"] == "extend" else 0.5, True),
        (lambda c: 2.0, False),  # it is nearly right
        (lambda c: 1e3 if c["heads"] == "MQA 4/1" and c["head_dim"] == "128" and c["data"] == "peaky" else 0.5, False),
        (lambda c: 1e3 if c["prefix"] in ("65", "127", "128", "129", "200", "2200") else 0.5, True),
    ],
)
def test_only_a_kernel_that_is_wrong_by_far_on_many_calls_is_not_run_on_all(
    wrong: Callable[[dict[str, str]], float], early: bool
) -> None:
    assert (made_until(wrong) < len(order()) / 2) == early


def test_long_calls_are_made_in_falling_order_so_that_shorter_ones_follow() -> None:
    """A merge of partial results that reads those of an earlier call, where its own are fewer, passed."""
    longest = [max(call.lens_k) for call in in_order(made())]
    long = [n for n in longest if n > 1024]
    assert longest[-len(long) :] == sorted(long, reverse=True)
    call_of = {case.name: call for case, call in made()}
    decode = [call_of[case.name] for case in order() if case.condition["phase"] == "decode"]
    for splits in (3, 5, 6, 7):
        assert any(
            -(-later.lens_k[0] // 512) == splits and -(-first.lens_k[0] // 512) >= 8
            for at, later in enumerate(decode)
            for first in decode[:at]
            if first.q.shape[1:] == later.q.shape[1:] and first.k.shape[1:] == later.k.shape[1:] and first.q.dtype == later.q.dtype
        )


def test_a_kernel_whose_log_sum_exps_are_wrong_by_far_is_not_run_on_all() -> None:
    every = results(order(), lambda condition: 0.5)
    for result in every:
        result.lse_errors = SimpleNamespace(excess=1e3)  # type: ignore[misc]
    assert clearly_wrong(every[: len(first())], len(first()), len(order()))
