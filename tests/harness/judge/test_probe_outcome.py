from __future__ import annotations

import math
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from assay.harness.engines.sglang.features import Feature
from assay.harness.evidence.probes import ProbePass, Scores
from assay.harness.judge.invariance_arms import BASE, ArmJudge
from assay.harness.judge.probe_outcome import accept_length, outcome
from assay.harness.judge.probe_scores import Bound, Measure, bounds, factor, floor_of
from assay.harness.statement import state
from assay.reports.wording.say import say

Limits = dict[Measure, Bound]


@pytest.fixture(scope="module")
def limits(arm_records: ModuleType) -> Limits:
    return bounds(arm_records.BASE, [arm_records.AGAIN], "float32")


@pytest.mark.parametrize("measure", ["prefill", "decode"])
def test_what_moves_by_more_than_rounding_differs(arm_records: ModuleType, limits: Limits, measure: str) -> None:
    found = outcome(arm_records.BASE, arm_records.arm("batch", **{measure: 0.05}), limits)
    assert found.state == "differs"
    assert found.first is not None
    assert found.first.probe == "0+8"
    assert found.first.index == {"prefill": 5, "decode": 12}[measure]


def test_one_position_of_a_thousand_is_enough(arm_records: ModuleType, limits: Limits) -> None:
    replies = [arm_records.reply(f"{n}+8") for n in range(200)]
    base = arm_records.BASE.model_copy(update={"replies": tuple(replies)})
    replies[150] = arm_records.reply("150+8", decode=0.02)
    found = outcome(base, arm_records.arm("batch").model_copy(update={"replies": tuple(replies)}), limits)
    assert found.state == "differs"
    assert found.first is not None
    assert found.first.probe == "150+8"


def test_an_arm_that_failed_was_not_run(arm_records: ModuleType, limits: Limits) -> None:
    record = arm_records.arm("batch", problem="the server died")
    assert outcome(arm_records.BASE, record, limits).state == "not run"
    assert outcome(arm_records.BASE, record, limits).why == (state("shows-nothing", why="failed", said="the server died"),)


def test_the_floor_excuses_no_more_than_its_dtype_can(arm_records: ModuleType) -> None:
    broken = arm_records.arm(number=1, why="base again", decode=1.0)
    limits = bounds(arm_records.BASE, [broken], "float32")
    assert limits["decode"].mean <= 1e-6
    assert bounds(arm_records.BASE, [broken], "bfloat16")["decode"].mean == 1e-3
    assert outcome(arm_records.BASE, arm_records.arm("batch", decode=1.0), limits).state == "differs", (
        "as wrong as the base is in other batches"
    )


def test_the_floor_widens_the_bound(arm_records: ModuleType) -> None:
    noisy = bounds(arm_records.BASE, [arm_records.AGAIN, arm_records.arm(number=2, why="base longer", prefill=3e-3)], "bfloat16")
    quiet = bounds(arm_records.BASE, [arm_records.BASE], "bfloat16")
    assert noisy["prefill"].mean > quiet["prefill"].mean
    assert noisy["decode"] == noisy["prefill"], "in half precision, they share the larger floor"
    longer = arm_records.arm(number=2, why="base longer", prefill=1e-4)
    alone = bounds(arm_records.BASE, [arm_records.AGAIN, longer], "float32")
    assert alone["decode"] != alone["prefill"]


def noisy(arm_records: ModuleType, rng: Any, flips: float, flip: float, wrong: float = 0.0) -> ProbePass:
    """Make an arm of 21 probes with the noise of half precision, and of experts that flip; one probe differs further."""
    lengths = [*range(8, 26), 100, 120, 128]
    replies = []
    for n, length in enumerate(lengths):
        flipped = flip * (rng.random(length) < flips) * np.exp(rng.normal(0, 0.6, length))
        shifts = 2e-3 * np.exp(rng.normal(0, 0.6, length)) + flipped
        rows = [arm_records.scores(0, 1, shift + (0.0 if n else wrong)) for shift in shifts]
        joined = {name: sum((getattr(row, name) for row in rows), ()) for name in ("own", "ids", "logprobs")}
        scores = Scores(first=1, tokens=tuple(range(length)), **joined)
        replies.append(arm_records.reply(f"{n}+8", prefill=scores, decode=scores))
    return cast("ProbePass", arm_records.arm("batch").model_copy(update={"replies": tuple(replies)}))


@pytest.mark.few(1)
@pytest.mark.parametrize(("flips", "flip"), [(0.0, 0.0), (0.02, 0.15), (0.01, 0.4)], ids=["dense", "experts", "far experts"])
def test_an_honest_arm_seldom_differs_in_half_precision_and_a_probe_that_is_wrong_does(
    arm_records: ModuleType, flips: float, flip: float
) -> None:
    rng, honest, found = np.random.default_rng(1), [], []
    base = noisy(arm_records, rng, 0.0, 0.0)
    for _ in range(8):
        again = [noisy(arm_records, rng, flips, flip) for _ in range(3)]
        limits = bounds(base, again, "bfloat16")
        honest.append(outcome(base, noisy(arm_records, rng, flips, flip), limits).state)
        wrong = 160 * floor_of(base, again)["decode"].mean  # nats: a shift of s is one of 0.37 s squared
        found.append(outcome(base, noisy(arm_records, rng, flips, flip, wrong=math.sqrt(2.7 * wrong)), limits))
    assert not honest.count("differs")
    assert flips or honest.count("same") == 8
    assert {each.state for each in found} == {"differs"}, "one of 21, at each of its positions"
    assert flips or {each.first and each.first.probe for each in found} == {"0+8"}


@pytest.mark.parametrize("askings", [1, 3])
def test_an_honest_asking_is_beyond_its_bounds_at_the_stated_rate_where_tails_are_as_heavy_as_assumed(askings: int) -> None:
    values = np.random.default_rng(5).pareto(2, (400_000, askings + 1)) + 1
    beyond = float((values[:, 0] > factor(askings) * values[:, 1:].max(axis=1)).mean())
    assert 8 * beyond == pytest.approx(0.01, rel=0.2), "eight distances of an arm"


def test_another_kernel_may_round_as_an_honest_one_does(arm_records: ModuleType, limits: Limits) -> None:
    known = {"kernel": Feature("kernel", "", cost="another kernel"), "batch": Feature("batch", "")}
    for dtype, shift in (("float32", 1e-3), ("bfloat16", 2e-2)):
        record = arm_records.arm("kernel", prefill=shift)
        judge = ArmJudge({BASE: arm_records.BASE}, limits, known, dtype)
        assert judge.outcome(record).state == "same"
        assert judge.outcome(arm_records.arm("batch", prefill=shift)).state == "differs"
    wrong = arm_records.arm("kernel", prefill=0.3)
    assert judge.outcome(wrong).state == "differs"


def test_drafts_that_are_no_longer_accepted_are_a_difference(arm_records: ModuleType, limits: Limits) -> None:
    known = {"draft": Feature("draft", "", drafts=3.0), "ngram": Feature("ngram", "")}
    lost, kept = (arm_records.arm("draft", verifications=passes) for passes in (arm_records.DEPTH, 2))
    judge = ArmJudge({BASE: arm_records.BASE}, limits, known, "float32")
    shown = judge.outcome(lost)
    assert shown.state == "differs"
    assert shown.why == (state("arm-differs", by="drafts declared", accepted=1.0, declared=3.0),)
    assert judge.outcome(kept).state == "same"
    ngram = arm_records.arm("ngram", verifications=arm_records.DEPTH)
    assert judge.outcome(ngram).state == "same", "nothing is declared"


@pytest.mark.parametrize(
    ("passes", "odd", "expected"),
    [(2, 0, "same"), (2, 4, "same"), (2, 15, "same"), (2, 17, "differs"), (3, 0, "differs")],
    ids=["equal", "within 5 %", "by chance", "in many probes", "in all"],
)
def test_drafts_that_a_second_feature_loses_are_a_difference(
    arm_records: ModuleType, limits: Limits, passes: int, odd: int, expected: str
) -> None:
    known = {"draft": Feature("draft", "", drafts=1.0), "page": Feature("page", "")}
    alone, both = arm_records.drafting("draft", passes=2), arm_records.drafting("draft", "page", passes=passes, odd=odd)
    base = arm_records.BASE.model_copy(update={"replies": alone.replies})
    records = {frozenset(record.features): record for record in (base, alone, both)}
    judge = ArmJudge(records, limits, known, "float32")
    assert judge.drafted_by(frozenset(both.features)) is alone
    shown = judge.outcome(both)
    assert shown.state == expected
    if passes == 3:
        assert shown.why == (state("arm-differs", by="drafts", passes=120, alone=80, arm="draft"),)
    assert ArmJudge({BASE: base}, limits, known, "float32").outcome(both).state == "same", "nothing is compared"


def test_whose_drafts_an_arms_are_compared_with(arm_records: ModuleType) -> None:
    known = {"draft": Feature("draft", "", drafts=1.0), "ngram": Feature("ngram", ""), "page": Feature("page", "")}
    records = {BASE: arm_records.BASE, frozenset({"draft"}): arm_records.arm("draft")}
    eagle, ngram = ("--speculative-algorithm=EAGLE",), ("--speculative-algorithm=NGRAM",)
    for features, flags, expected in (
        ({"page"}, (), None), ({"page"}, eagle, BASE), ({"page"}, ngram, None), ({"draft"}, (), None),
        ({"draft", "page"}, (), {"draft"}), ({"ngram", "page"}, (), None),
    ):  # fmt: skip
        found = ArmJudge(records, {}, known, "float32", flags).drafted_by(frozenset(features))
        assert found is (None if expected is None else records[frozenset(expected)]), (features, flags)


def test_greedy_texts_that_part_are_a_difference_unless_at_a_tie(arm_records: ModuleType, limits: Limits) -> None:
    base = arm_records.BASE.model_copy(update={"texts": (arm_records.text("yes", "no", 0.5),)})
    for other, expected in ((arm_records.text("no", "yes", 0.5), "differs"), (arm_records.text("yes", "no", 0.5), "same")):
        record = arm_records.arm("batch").model_copy(update={"texts": (other,)})
        assert outcome(base, record, limits, swing=1e-3).state == expected
    tie = arm_records.BASE.model_copy(update={"texts": (arm_records.text("yes", "no", 1e-4),)})
    flipped = arm_records.arm("batch").model_copy(update={"texts": (arm_records.text("no", "yes", 1e-4),)})
    assert outcome(tie, flipped, limits, swing=1e-3).state == "same"


def test_an_answer_of_another_length_is_a_difference(arm_records: ModuleType, limits: Limits) -> None:
    short = arm_records.reply("1+8", decode=arm_records.scores(arm_records.PROMPT, 4))
    record = arm_records.arm("streamed")
    record = record.model_copy(update={"replies": (record.replies[0], short, record.replies[2])})
    shown = outcome(arm_records.BASE, record, limits)
    assert shown.state == "differs"
    assert shown.why == (state("arm-differs", by="lengths", answers=1, probe="1+8", before=6, now=4),)


def cut(scores: Scores, count: int) -> Scores:
    return scores.model_copy(update={name: getattr(scores, name)[:count] for name in ("tokens", "own", "ids", "logprobs")})


def changed(record: ProbePass, **fields: Any) -> ProbePass:
    """Change a reply's fields, in the last of an arm's probes."""
    *replies, last = record.replies
    return record.model_copy(update={"replies": (*replies, last.model_copy(update=fields))})


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (lambda arm, r: arm.model_copy(update={"replies": arm.replies[:1]}), {"why": "probes", "answered": 1, "probes": 3}),
        (lambda arm, r: arm.model_copy(update={"texts": ()}), {"why": "texts", "written": 0, "texts": 1}),
        (lambda arm, r: changed(arm, prefill=Scores()), {"why": "scores", "probe": "2+8"}),
        (lambda arm, r: changed(arm, prefill=cut(r.prefill, 3)), {"why": "prompt", "probe": "2+8"}),
        (lambda arm, r: arm.model_copy(update={"seen": {}}), {"why": "feature", "feature": "batch", "said": ""}),
    ],
    ids=["probes", "texts", "scores", "prompt", "neither seen nor unseen"],
)
def test_what_is_not_compared_whole_shows_nothing(
    arm_records: ModuleType, limits: Limits, missing: Any, why: dict[str, Any]
) -> None:
    text = (arm_records.text("yes", "no", 0.5),)
    base, arm = (record.model_copy(update={"texts": text}) for record in (arm_records.BASE, arm_records.arm("batch")))
    assert outcome(base, arm, limits).state == "same"
    found = outcome(base, missing(arm, arm.replies[-1]), limits)
    assert (found.state, found.why) == ("not shown", (state("shows-nothing", **why),))


@pytest.mark.parametrize("passes", [0, 3], ids=["forced", "verified"])
def test_another_token_is_a_difference_unless_at_a_tie_that_drafts_decided(
    arm_records: ModuleType, limits: Limits, passes: int
) -> None:
    def wrote(token: int, gap: float) -> ProbePass:
        rows = ((-1.0, -1.0 - gap, -3.0),) * arm_records.DEPTH
        scores = arm_records.scores(arm_records.PROMPT, arm_records.DEPTH)
        other = scores.model_copy(update={"tokens": (7, 7, token, 7, 7, 7), "logprobs": rows})
        return changed(arm_records.arm("draft"), decode=other, verifications=passes)

    apart = outcome(wrote(7, 0.4), wrote(8, 0.4), limits, swing=0.5)
    parts = state("arm-differs", by="tokens", answers=1, probe="2+8", token=3)
    assert (apart.state, apart.why) == ("differs", (parts,))
    assert outcome(wrote(7, 0.2), wrote(6, 0.2), limits, swing=0.5).state == "differs", "it lists no such token"
    tie = outcome(wrote(7, 0.2), wrote(8, 0.2), limits, swing=0.5)
    told = state("shows-nothing", why="answer", probe="2+8")
    assert (tie.state, tie.why) == (("same", ()) if passes else ("not shown", (told,)))


def test_another_end_is_a_difference(arm_records: ModuleType, limits: Limits) -> None:
    arm = arm_records.arm("batch")
    aborted = outcome(changed(arm_records.BASE, finish="length"), changed(arm, finish="abort"), limits)
    assert aborted.state == "differs"
    assert aborted.why == (state("arm-differs", by="ends", answers=1, probe="2+8", before="length", now="abort"),)
    text = arm_records.text("yes", "no", 0.5)
    stopped = text.model_copy(update={"finish_reason": "stop", "completion_tokens": 9})
    base, record = (each.model_copy(update={"texts": (end,)}) for each, end in ((arm_records.BASE, text), (arm, stopped)))
    found = outcome(base, record, limits)
    assert found.state == "differs"
    ends = {"before": ("length", 1), "now": ("stop", 9)}
    assert found.why == (state("arm-differs", by="ends of texts", texts=1, first="greedy-000", **ends),)
    tie = arm_records.text("no", "yes", 1e-4).model_copy(update={"finish_reason": "stop", "completion_tokens": 9})
    base, record = (
        each.model_copy(update={"texts": (end,)}) for each, end in ((base, arm_records.text("yes", "no", 1e-4)), (arm, tie))
    )
    assert outcome(base, record, limits, swing=1e-3).state == "same", "behind a tie, texts have ends of their own"


def test_blocks_of_another_prompt_are_a_difference_even_without_a_distance(arm_records: ModuleType, limits: Limits) -> None:
    got = {"cached_tokens": 32, "foreign_tokens": 28}
    named = state("arm-differs", by="cache", answers=1, probe="2+8", cached=32, shared=4)
    arm = changed(arm_records.arm("prefix-cache"), **got)
    found = outcome(arm_records.BASE, arm, limits)
    assert (found.state, found.first, found.why) == ("differs", None, (named,))
    found = outcome(arm_records.BASE, changed(arm_records.arm("prefix-cache", prefill=0.1), **got), limits)
    assert (found.state, found.first is not None, found.why) == ("differs", True, (named,))
    assert say(named).startswith("the prefix cache gave 1 prompt blocks of another one, the first to probe 2+8: 32 tokens came")
    assert outcome(changed(arm_records.BASE, **got), arm, limits).state == "same", "both servers take them"


def test_deterministic_kernels_allow_no_bit_of_difference_in_a_batch(arm_records: ModuleType, limits: Limits) -> None:
    exact = Feature("exact", "", on=("--exact",), cost="a base of its own")
    known = {"exact": exact, "batch": Feature("batch", "", bitwise=True), "page": Feature("page", "", on=("--page",))}
    base, batched = arm_records.arm("exact"), arm_records.arm("exact", "batch", decode=1e-6)
    judge = ArmJudge({BASE: base, frozenset({"exact"}): base}, limits, known, "float32")
    assert judge.outcome(batched).state == "differs"
    assert judge.outcome(arm_records.arm("exact", "batch")).state == "same"
    assert judge.outcome(arm_records.arm("exact", "page", decode=1e-6)).state == "same", "other pages may round otherwise"
    assert judge.outcome(arm_records.arm("exact", prefill=1e-3)).state == "same"


def test_accepted_tokens_a_pass(arm_records: ModuleType) -> None:
    assert accept_length(arm_records.BASE) is None
    assert accept_length(arm_records.arm("ngram", verifications=2)) == arm_records.DEPTH / 2
