from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, Mask, Outputs
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import log_sum_exp, oracle, sequences
from assay.harness.attention.shapes import Shape
from assay.harness.localize.experiment import Experiments, Lab, Place, experiment, features
from assay.harness.localize.faults import Fault, WrongLses, WrongOutputs, breaks, writes_inputs, writes_outside
from assay.harness.localize.guard import Guard
from assay.harness.localize.rules import meets, words

Wrong = Callable[[AttentionCall, int, int, int], bool]
"""(call, sequence, new tokens, cached prefix) -> whether the sequence is wrong."""


def zeros_where(wrong: Wrong) -> Callable[[AttentionCall], Tensor]:
    def kernel(call: AttentionCall) -> Tensor:
        out = oracle(call).to(call.q.dtype)
        for b, (q, k) in enumerate(sequences(call)):
            new = q.stop - q.start
            if wrong(call, b, new, k.stop - k.start - new):
                out[q] = 0
        return out

    return kernel


def tried(kernel: Kernel, place: Place, most: int = 900, fault: Fault | None = None, memory: bool = False) -> Experiments:
    dims = frozenset((dim, dim) for dim in (64, 96, 128))
    guard = Guard(kernel, memory=memory)
    lab = Lab(guard, dims, (torch.float32, torch.bfloat16), "cpu", lambda: False, most, fault or WrongOutputs())
    return experiment(lab, [place])


EXTEND, DECODE = Place(Shape("extend", ((150, 213),)), 0), Place(Shape("decode", ((1, 77),) * 4), 2)
BEHIND = Place(Shape("extend", ((40, 30), (9, 50), (0, 3), (150, 213)), (8, 2), 128, torch.bfloat16), 3)


@pytest.mark.parametrize(
    ("wrong", "place", "said"),
    [
        (lambda call, b, new, prefix: prefix >= 129, EXTEND, "cached prefix >= 129"),
        (
            lambda call, b, new, prefix: new >= 97 and prefix % 16 != 0,
            EXTEND,
            "new tokens >= 97 and cached prefix % 16 != 0",
        ),
        (
            lambda call, b, new, prefix: call.phase == "decode" and 3 <= len(call.lens_q) <= 8,
            DECODE,
            "decode and 3 <= sequences <= 8",
        ),
        (lambda call, b, new, prefix: call.q.shape[2] > 64, BEHIND, "head_dim >= 96"),
        (lambda call, b, new, prefix: b > 0 and not call.lens_q[b - 1], BEHIND, "the sequence before it has no new tokens"),
        (
            lambda call, b, new, prefix: new + prefix < max(call.lens_k),
            Place(BEHIND.shape, 0),
            "another sequence of the batch is longer",
        ),
    ],
)  # fmt: skip
def test_a_condition_is_found_and_holds_on_calls_that_were_drawn_for_it(wrong: Wrong, place: Place, said: str) -> None:
    found = tried(zeros_where(wrong), place)
    assert found.tried is not None
    assert words(found.tried.rule, found.tried.context) == said
    assert min(found.tried.wrong, found.tried.right) >= 8
    for shape, result in found.kept:
        call = result.call
        for b, (new, prefix) in enumerate(shape.lens):
            if new:
                assert meets(found.tried, features(shape, b)) == wrong(call, b, new, prefix)


def test_borders_are_found_by_bisection_and_the_smallest_call_is_simple() -> None:
    found = tried(zeros_where(lambda call, b, new, prefix: 202 <= prefix <= 341), BEHIND)
    assert found.place == Place(Shape("extend", ((1, 202),), (2, 1)), 0)
    [axis] = [axis for axis in found.axes if axis.name == "cached prefix"]
    assert (min(axis.wrong), max(axis.wrong)) == (202, 341)
    assert {201, 342} <= set(axis.right)


def test_nothing_is_said_where_wrongness_depends_on_the_numbers() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        out = oracle(call).to(call.q.dtype)
        return torch.where(call.q[..., :1] > 0.9, 0, out)

    assert tried(kernel, EXTEND).tried is None


def test_nothing_is_said_of_two_faults_at_once_or_once_the_budget_is_spent() -> None:
    either = zeros_where(lambda call, b, new, prefix: prefix % 7 == 3 or (new % 5 == 2 and prefix > 60))
    assert tried(either, Place(Shape("extend", ((57, 73),)), 0)).tried is None
    assert tried(zeros_where(lambda call, b, new, prefix: prefix >= 129), EXTEND, most=60).tried is None


def test_a_kernel_is_asked_for_its_own_head_dims_and_dtypes_alone() -> None:
    seen = set()

    def kernel(call: AttentionCall) -> Tensor:
        seen.add((call.q.shape[2], call.q.dtype))
        return torch.zeros_like(call.q)

    tried(kernel, EXTEND, most=200)
    assert seen <= {(dim, dtype) for dim in (64, 96, 128) for dtype in (torch.float32, torch.bfloat16)}


def test_no_call_is_made_of_fewer_than_no_keys() -> None:
    @declares(features=("not_causal",))
    def kernel(call: AttentionCall) -> Tensor:
        return torch.zeros_like(call.q) if call.features else oracle(call).to(call.q.dtype)

    found = tried(kernel, Place(Shape("extend", ((64, -62),), asked=("cross attention",)), 0), most=80)
    assert found.place is not None
    assert sum(found.place.own) >= 0


def test_nothing_is_said_of_a_kernel_that_keeps_state() -> None:
    faulty, seen = zeros_where(lambda call, b, new, prefix: prefix >= 129), set[float]()

    def kernel(call: AttentionCall) -> Tensor:
        """Is wrong the first time that it gets a call, and right the second."""
        known = float(call.q.double().sum())
        out = oracle(call).to(call.q.dtype) if known in seen else faulty(call)
        seen.add(known)
        return out

    assert tried(kernel, EXTEND).tried is None


def test_a_lab_that_made_no_call_again_says_that_nothing_repeats() -> None:
    lab = Lab(Guard(zeros_where(lambda *_: False), memory=False), frozenset(), (), "cpu", lambda: False)
    assert not lab.repeats()


@declares(features=("lse", "window"))
def lse_beyond_a_window(call: AttentionCall) -> Outputs:
    """Forgets the window in log-sum-exps."""
    return Outputs(oracle(call).to(call.q.dtype), log_sum_exp(call.with_spec(mask=Mask())).float())


def raises_in_batches(call: AttentionCall) -> Tensor:
    """Has no room for five sequences."""
    if len(call.lens_q) > 4:
        raise RuntimeError(f"a grid of {len(call.lens_q)}")
    return oracle(call).to(call.q.dtype)


def scales_q_in_decode(call: AttentionCall) -> Tensor:
    out = oracle(call).to(call.q.dtype)
    if call.phase == "decode":
        call.q.mul_(call.scale)
    return out


def stores_whole_tiles(call: AttentionCall) -> Tensor:
    """Stores 16 rows where the batch has fewer."""
    out = torch.empty_like(call.q)
    out.copy_(oracle(call).to(call.q.dtype))
    rows = len(call.q)
    torch.as_strided(out, (max(rows, 16), *out.shape[1:]), out.stride(), out.storage_offset())[rows:] = 0
    return out


RAISED = "raised RuntimeError (test_experiment.py, line {}, in raises_in_batches)"


@pytest.mark.parametrize(
    ("kernel", "fault", "place", "said"),
    [
        (lse_beyond_a_window, WrongLses(), Place(Shape("extend", ((40, 100), (3, 7)), asked=("window 17",)), 0), "length > window"),
        (
            raises_in_batches,
            breaks(RAISED.format(raises_in_batches.__code__.co_firstlineno + 3)),
            Place(Shape("extend", ((5, 9),) * 7), 0),
            "sequences >= 5",
        ),
        (scales_q_in_decode, writes_inputs, DECODE, "decode"),
        (stores_whole_tiles, writes_outside, Place(Shape("extend", ((7, 30),)), 0), "new tokens of the batch <= 15"),
    ],
)
def test_conditions_of_other_faults_are_tried_in_the_same_way(kernel: Kernel, fault: Fault, place: Place, said: str) -> None:
    found = tried(kernel, place, 900, fault, memory=fault is writes_outside)
    assert found.tried is not None
    assert words(found.tried.rule, found.tried.context) == said
    assert min(found.tried.wrong, found.tried.right) >= 8
