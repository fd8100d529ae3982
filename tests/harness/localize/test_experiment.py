from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, Mask, Outputs
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import log_sum_exp, sequences
from assay.harness.attention.shapes import Shape
from assay.harness.evidence.kernel_result import Axis, Property, Tried
from assay.harness.localize.drawing import Drawer
from assay.harness.localize.experiment import Experiments, _between, agreeing, experiment, known_of_wrong, standing
from assay.harness.localize.faults import Fault, WrongLses, WrongOutputs, breaks, writes_inputs, writes_outside
from assay.harness.localize.features import features, words
from assay.harness.localize.guard import Guard, attempt
from assay.harness.localize.lab import Lab, Place
from assay.harness.localize.rules import Points, meets, rules

Wrong = Callable[[AttentionCall, int, int, int], bool]
"""(call, sequence, new tokens, cached prefix) -> whether the sequence is wrong."""


def zeros_where(wrong: Wrong) -> Callable[[AttentionCall], Tensor]:
    def kernel(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        for b, (q, k) in enumerate(sequences(call)):
            new = q.stop - q.start
            if wrong(call, b, new, k.stop - k.start - new):
                out[q] = 0
        return out

    return kernel


def tried(
    kernel: Kernel, place: Place, most: int = 900, fault: Fault | None = None, memory: bool = False, seed: int = 0
) -> Experiments:
    dims = frozenset((dim, dim) for dim in (64, 96, 128))
    guard = Guard(kernel, memory=memory)
    lab = Lab(guard, dims, (torch.float32, torch.bfloat16), "cpu", lambda: 0.0, most, fault or WrongOutputs())
    return experiment(lab, [place], seed=seed)


EXTEND, DECODE = Place(Shape("extend", ((150, 213),)), 0), Place(Shape("decode", ((1, 77),) * 4), 2)
BEHIND = Place(Shape("extend", ((40, 30), (9, 50), (0, 3), (150, 213)), (8, 2), 128, torch.bfloat16), 3)


@pytest.mark.few(1)
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
        (lambda call, b, new, prefix: call.q.shape[2] > 64, BEHIND, "head_dim >= 96 (64 is right)"),
        (lambda call, b, new, prefix: b > 0 and not call.lens_q[b - 1], BEHIND, "the sequence before it has no new tokens"),
        (
            lambda call, b, new, prefix: new * call.heads.group > 64,
            EXTEND,
            "new tokens x q heads per kv head >= 65",
        ),
        (
            lambda call, b, new, prefix: call.phase == "extend" and max(call.lens_k) - new - prefix >= 64,
            Place(BEHIND.shape, 0),
            "extend and length of the longest sequence >= length +64",
        ),
        (
            lambda call, b, new, prefix: new <= 16 and prefix >= 300,
            Place(Shape("extend", ((9, 413),)), 0),
            "new tokens <= 16 and cached prefix >= 300",
        ),
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


def test_a_limit_on_a_number_that_some_sequences_lack_is_bisected() -> None:
    wrong = zeros_where(lambda call, b, new, prefix: b > 0 and call.lens_q[b - 1] >= 40)
    lab = Lab(Guard(wrong, memory=False), frozenset(((64, 64),)), (torch.float32,), "cpu", lambda: 0.0)
    shapes = [Shape("extend", ((before, 0), (3, 0))) for before in (9, 80)]
    for shape in (*shapes, Shape("extend", ((70, 0),))):
        lab.ask(shape)
    drawer = Drawer(lab, Place(shapes[1], 1), {"heads": ((2, 1),)}, 0)
    rule = (Property(feature="before_new", kind=">=", values=(80.0,)),)
    asked = list(_between(lab, drawer, {}, rule))
    assert asked
    assert all(9 < shape.lens[0][0] < 80 for shape in asked)


def test_right_answers_refute_nothing_on_data_on_which_the_fault_may_not_show() -> None:
    found = tried(zeros_where(lambda call, b, new, prefix: prefix >= 129 and float(call.v.abs().max()) < 100), EXTEND)
    assert found.tried is not None
    assert words(found.tried.rule, found.tried.context) == "cached prefix >= 129"


def test_a_kernel_that_is_always_wrong_is_said_to_be() -> None:
    found = tried(zeros_where(lambda *_: True), EXTEND)
    assert found.tried is not None
    assert (found.tried.rule, found.tried.context, found.tried.right) == ((), {}, 0)


def test_nothing_is_said_where_wrongness_depends_on_the_numbers() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        return torch.where(call.q[..., :1] > 0.9, 0, out)

    found = tried(kernel, EXTEND)
    assert (found.tried, found.axes, found.by_numbers) == (None, (), True)


def test_a_value_is_right_only_if_no_call_with_it_was_wrong() -> None:
    """Of two conditions, varying one axis of a call shows only the one that the call meets."""
    found = tried(zeros_where(lambda call, b, new, prefix: prefix >= 129 or new == 5 or call.q.dtype == torch.bfloat16), EXTEND)
    wrong = [known for known, bad in found.points if bad]
    assert not found.by_numbers
    assert {known["dtype"] for known in wrong} == {"float32", "bfloat16"}
    assert "dtype" not in {axis.name for axis in found.axes}  # no value of it is right
    for axis, feature in (("cached prefix", "prefix"), ("new tokens", "new")):
        [right] = [{*seen.right} for seen in found.axes if seen.name == axis] or [set()]
        assert not right & {known[feature] for known in wrong}

    axes = Axis(name="dtype", wrong=("float32",), right=("bfloat16", "float16")), Axis(name="layer", wrong=(0,), right=(1,))
    worst = Shape("extend", ((3, 40),), dtype=torch.float16, layer=1).make(0)
    [axis] = agreeing(axes, known_of_wrong([attempt(zeros_where(lambda *_: True), worst)]))
    assert axis == Axis(name="dtype", wrong=("float16", "float32"), right=("bfloat16",))


def test_an_axis_of_numbers_that_does_not_decide_by_itself_is_left_out() -> None:
    asked = Axis(name="asked for", wrong=("window 64",), right=("nothing", "window 2"))
    axes = Axis(name="new tokens", wrong=(9,), right=(3, 5)), asked
    wrong = [{"new": new, "asked": asked} for new, asked in ((5, "window 17"), (9, "window 128"))]
    [axis] = agreeing(axes, wrong)
    assert axis == Axis(name="asked for", wrong=("window 17", "window 64", "window 128"), right=("nothing", "window 2"))


def test_every_call_of_a_dtype_is_not_called_wrong_since_no_call_lacks_that() -> None:
    found = tried(zeros_where(lambda call, b, new, prefix: call.q.dtype == torch.float32 or (new * 7 + prefix) % 5 == 3), EXTEND)
    assert found.tried is None


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
        return torch.zeros_like(call.q) if call.features else rounded_oracle(call)

    found = tried(kernel, Place(Shape("extend", ((64, -62),), asked=("cross attention",)), 0), most=80)
    assert found.place is not None
    assert sum(found.place.own) >= 0


def test_nothing_is_said_of_a_kernel_that_keeps_state() -> None:
    faulty, seen = zeros_where(lambda call, b, new, prefix: prefix >= 129), set[float]()

    def kernel(call: AttentionCall) -> Tensor:
        """Is wrong the first time that it gets a call, and right the second."""
        known = float(call.q.double().sum())
        out = rounded_oracle(call) if known in seen else faulty(call)
        seen.add(known)
        return out

    assert tried(kernel, EXTEND).tried is None


def test_a_lab_that_made_no_call_again_says_that_nothing_repeats() -> None:
    lab = Lab(Guard(zeros_where(lambda *_: False), memory=False), frozenset(), (), "cpu", lambda: 0.0)
    assert not lab.repeats()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wrong", "said", "part"),
    [
        (lambda out, call: out[256:], "last row in q, counted from 1, >= 257", "row in q >= 256"),
        (lambda out, call: out[:, 4:], "q heads >= 5", "q head >= 4"),
        (lambda out, call: out[..., 64:], "head_dim >= 96 (64 is right)", "output dim >= 64"),
        (lambda out, call: out[: call.lens_q[0]], "the sequence is the first of its batch", ""),
    ],
)
def test_the_part_of_a_sequence_that_is_wrong_is_said(
    wrong: Callable[[Tensor, AttentionCall], Tensor], said: str, part: str
) -> None:
    def kernel(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        wrong(out, call).zero_()
        return out

    found = tried(kernel, Place(Shape("extend", ((150, 213), (140, 3)), (8, 2), 128), int("row" in part)))
    assert found.tried is not None
    assert words(found.tried.rule, found.tried.context) == said
    assert (words(found.tried.part) if found.tried.part else "") == part


def test_what_a_call_asks_for_is_said() -> None:
    wrong = zeros_where(lambda call, b, new, prefix: call.spec.mask.window > 0 and prefix > 0)
    found = tried(declares(features=("window",))(wrong), Place(Shape("extend", ((9, 80),), asked=("window 17",)), 0))
    assert found.tried is not None
    assert words(found.tried.rule, found.tried.context) == "a prefix is cached and the call asks for a window"
    assert found.tried.rivals == ()


def test_a_rule_that_no_call_told_apart_is_said_too() -> None:
    faulty = zeros_where(lambda call, b, new, prefix: call.q.dtype == torch.bfloat16)

    def kernel(call: AttentionCall) -> Tensor:
        if (call.q.dtype == torch.bfloat16) != (call.q.shape[2] == 128):
            raise KernelRefused("bfloat16 is for 128 dims")
        return faulty(call)

    lab = Lab(Guard(kernel, memory=False), frozenset(((64, 64), (128, 128))), (torch.float32, torch.bfloat16), "cpu", lambda: 0.0)
    for new in range(1, 40):
        lab.ask(Shape("extend", ((new, 80),)))
    found = experiment(lab, [Place(Shape("extend", ((9, 80),), head_dim=128, dtype=torch.bfloat16), 0)])
    assert found.tried is not None
    assert found.tried.context == {}
    said = {words(rule) for rule in (found.tried.rule, *found.tried.rivals)}
    assert said == {"head_dim >= 128 (64 is right)", "dtype is bfloat16"}


def test_a_wrong_call_of_anybody_contradicts_a_condition() -> None:
    """The search for the smallest call makes calls of its own."""
    said = Tried(
        fault="output", rule=(Property(feature="prefix", kind=">=", values=(129.0,)),), context={}, wrong=9, right=9, calls=9
    )
    call = Shape("extend", ((3, 40), (3, 200))).make(0)
    both, second = (attempt(zeros_where(wrong), call) for wrong in (lambda *_: True, lambda call, b, new, prefix: b == 1))
    assert standing(said, known_of_wrong([both])) is None
    assert standing(said, known_of_wrong([second])) == said
    narrow = said.model_copy(update={"context": {"phase": "decode"}})
    assert standing(narrow, known_of_wrong([both])) == narrow.model_copy(update={"outside": 2})


def test_a_limit_that_no_call_can_reach_is_said_with_the_values_on_both_sides() -> None:
    """With three tokens for each item, 64 lies between what was right and what was wrong."""
    points = Points([{"n": 3 * n} for n in range(1, 40)], [3 * n > 64 for n in range(1, 40)])
    assert words(points.stated(rules(points)[0])) == "n >= 66 (63 is right)"
    points = Points([{"n": 3 * n} for n in range(1, 40)], [24 <= 3 * n <= 64 for n in range(1, 40)])
    assert words(points.stated(rules(points)[0])) == "24 <= n <= 63 (21 and 66 are right)"
    points = Points([{"n": n} for n in range(1, 40)], [n > 20 for n in range(1, 40)])
    assert words(points.stated(rules(points)[0])) == "n >= 21"


def test_a_window_is_varied_until_its_limit_has_neighbours() -> None:
    features = declares(features=("window",))
    kernel = features(zeros_where(lambda call, b, new, prefix: call.spec.mask.window >= 5 and prefix > 20))
    lab = Lab(Guard(kernel, memory=False), frozenset(((64, 64),)), (torch.float32,), "cpu", lambda: 0.0)
    found = experiment(lab, [Place(Shape("extend", ((3, 40),), asked=("window 16",)), 0)])
    assert found.tried is not None
    assert words(found.tried.rule) == "cached prefix >= 21 and window >= 5"


def test_the_part_of_a_sequence_depends_on_the_window_of_each_call() -> None:
    def beyond(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        place = torch.cat([torch.arange(p, p + n) for n, p in zip(call.lens_q, call.prefixes, strict=True)])
        out[(place >= call.spec.mask.window) & (call.spec.mask.window > 0)] = 0.0
        return out

    kernel = declares(features=("window",))(beyond)
    lab = Lab(Guard(kernel, memory=False), frozenset(((64, 64),)), (torch.float32,), "cpu", lambda: 0.0)
    found = experiment(lab, [Place(Shape("extend", ((40, 3),), asked=("window 17",)), 0)])
    assert found.tried is not None
    assert words(found.tried.part) == "position >= window"


@pytest.mark.slow  # fast: test_a_condition_is_found_and_holds_on_calls_that_were_drawn_for_it
def test_where_no_rule_holds_on_all_calls_what_all_wrong_ones_meet_is_said() -> None:
    def wrong(call: AttentionCall, b: int, new: int, prefix: int) -> bool:
        odd = (call.q.shape[1] * 7 + call.q.shape[2] // 16 * 5 + call.layer) % 3
        return prefix >= (129, 60, 300)[odd]

    found = tried(zeros_where(wrong), EXTEND)
    assert found.tried is not None
    assert (words(found.tried.rule, found.tried.context), found.tried.always) == ("cached prefix >= 60", False)


@declares(features=("lse", "window"))
def lse_beyond_a_window(call: AttentionCall) -> Outputs:
    """Forgets the window in log-sum-exps."""
    return Outputs(rounded_oracle(call), log_sum_exp(call.with_spec(mask=Mask())).float())


def raises_in_batches(call: AttentionCall) -> Tensor:
    """Has no room for five sequences."""
    if len(call.lens_q) > 4:
        raise RuntimeError(f"a grid of {len(call.lens_q)}")
    return rounded_oracle(call)


def scales_q_in_decode(call: AttentionCall) -> Tensor:
    out = rounded_oracle(call)
    if call.phase == "decode":
        call.q.mul_(call.scale)
    return out


def stores_whole_tiles(call: AttentionCall) -> Tensor:
    """Stores 16 rows where the batch has fewer."""
    out = torch.empty_like(call.q)
    out.copy_(rounded_oracle(call))
    rows = len(call.q)
    torch.as_strided(out, (max(rows, 16), *out.shape[1:]), out.stride(), out.storage_offset())[rows:] = 0
    return out


RAISED = "raised RuntimeError (test_experiment.py, line {}, in raises_in_batches)"


@pytest.mark.few(1)
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


def test_a_rule_that_all_wrong_calls_meet_is_not_limited_to_the_dtype_in_which_all_that_meet_it_are_wrong() -> None:
    def wrong(call: AttentionCall, b: int, new: int, prefix: int) -> bool:
        return prefix >= 129 and (call.q.dtype == torch.float32 or (new + prefix) % 4)

    found = tried(zeros_where(wrong), EXTEND, seed=1)  # some draws have no call that shows the exception
    assert found.tried is not None
    assert (words(found.tried.rule), found.tried.context, found.tried.always) == ("cached prefix >= 129", {}, False)
