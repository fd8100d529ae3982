from __future__ import annotations

import math
from types import ModuleType

import pytest

from assay.harness.evidence.probes import Scores
from assay.harness.judge.logits import merged_kl
from assay.harness.judge.probe_scores import Bound, Distance, Measure, ProbePlace, bound_of, changed_probes, factor, places


def test_positions_are_compared_where_both_have_one(arm_records: ModuleType) -> None:
    first = arm_records.SHARED + 4
    late = arm_records.reply(prefill=arm_records.scores(first, arm_records.PROMPT - first, 0.1))
    found = places([arm_records.reply()], [late], "prefill")
    assert [place.index for place in found] == list(range(first, arm_records.PROMPT))


def test_answers_are_compared_until_they_part(arm_records: ModuleType) -> None:
    own = arm_records.scores(arm_records.PROMPT, arm_records.DEPTH, 0.0, tokens=(12, 13, 14, 9, 16, 17))
    other = arm_records.reply(decode=own)
    assert len(places([arm_records.reply()], [other], "decode")) == 4, "the position at which they part has the same history"


def test_a_token_that_is_not_listed_is_at_most_as_probable_as_the_last_one(arm_records: ModuleType) -> None:
    base = arm_records.reply()
    row = (math.log(0.5), math.log(0.3), math.log(0.1))
    count = arm_records.DEPTH
    foreign = Scores(
        first=base.decode.first, tokens=base.decode.tokens, own=(row[0],) * count, ids=((1, 2, 3),) * count, logprobs=(row,) * count
    )
    found = places([base], [arm_records.reply(decode=foreign)], "decode")
    p = base.decode.logprobs[0]
    assert found[0].kl == pytest.approx(float(merged_kl(p, [min(row[2], p_i) for p_i in p])))
    assert found[0].kl > 0.3


def test_a_number_that_is_not_finite_is_infinitely_far(arm_records: ModuleType) -> None:
    first, nan = arm_records.PROMPT, math.nan
    bad = Scores(first=first, tokens=(first,), own=(nan,), ids=((7, 8, 9),), logprobs=((nan, nan, nan),))
    found = places([arm_records.reply()], [arm_records.reply(decode=bad)], "decode")
    assert found[0].kl == math.inf
    assert not Bound(1.0, 1.0).holds(Distance.of(found))


@pytest.mark.parametrize(("shift", "listed"), [(-5.0, False), (-5.0, True), (math.nan, False), (math.nan, True)])
def test_the_prompts_own_tokens_are_compared(arm_records: ModuleType, shift: float, listed: bool) -> None:
    scores = arm_records.reply().prefill
    tokens = (7 if listed else 50,) * len(scores.tokens)
    own = (scores.own if listed else (-9.0,) * len(scores.tokens))[:-1]  # that of the last stays as it is
    base = arm_records.reply(prefill=scores.model_copy(update={"tokens": tokens, "own": (*own, -9.0)}))
    moved = base.prefill.model_copy(update={"own": (*(value + shift for value in own), -9.0)})
    *found, last = (place.kl for place in places([base], [arm_records.reply(prefill=moved)], "prefill"))
    least = math.inf if math.isnan(shift) else 0.99 * math.exp(own[0]) * (math.exp(shift) - 1 - shift)
    assert min(found) >= least, "the own token's term; what is left to all others adds to it"
    assert last == 0.0


def test_distances_sum_up() -> None:
    distance = Distance.of([ProbePlace("a", 1, 0.1), ProbePlace("a", 2, 0.3)])
    assert (distance.positions, distance.mean, distance.worst) == (2, pytest.approx(0.2), 0.3)
    assert distance.at == ProbePlace("a", 2, 0.3)
    assert Distance.of([]).at is None
    assert not Bound(0.1, 1.0).holds(distance)
    assert not Bound(1.0, 0.1).holds(distance)
    assert Bound(0.2, 0.3).holds(distance)


def test_probes_with_a_position_out_of_bounds_differ(arm_records: ModuleType) -> None:
    limits: dict[Measure, Bound] = dict.fromkeys(("prefill", "decode"), Bound(1e-3, 1e-2))  # type: ignore[arg-type]
    other = [arm_records.reply("0+8"), arm_records.reply("1+8", decode=0.5), arm_records.reply("2+8", prefill=0.5)]
    assert changed_probes(arm_records.BASE.replies, other, limits) == ["1+8", "2+8"]
    assert changed_probes(arm_records.BASE.replies, [arm_records.reply("0+8", decode=0.01)], limits) == []


def test_a_probe_that_its_repeats_do_not_move_may_move_as_far_as_half_of_the_probes() -> None:
    """Kernels that compute each row alone repeat a prefill to the bit; after a cached prefix, other kernels round it."""
    moved = {"0+3": (4e-4, 2e-4), "0+16": (2e-4, 2e-4), "17+9": (0.0, 0.0)}
    again = Distance(300, 1e-4, 1e-3, None, moved)
    bound = bound_of([again], 3, "bfloat16")
    assert not bound.beyond(Distance(300, 1e-4, 1e-3, None, {"17+9": (2e-3, 1e-3)}))
    assert bound.beyond(Distance(300, 1e-4, 1e-3, None, {"17+9": (factor(3) * 3e-4, 1e-3)})) == {"17+9"}
    assert not bound.beyond(Distance(300, 1e-4, 1e-3, None, {"0+3": (factor(3) * 3e-4, 1e-3)})), "its own repeats move it more"
    assert bound.floor is not None
    assert not bound.floor.beyond(Distance(300, 1e-4, 1e-3, None, {"17+9": (factor(3) * 3e-4, 1e-3)}))
