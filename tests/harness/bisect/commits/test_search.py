from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.harness.bisect.commits import search
from assay.harness.bisect.commits.search import (
    MAX_END_PROBES,
    MAX_UNSEEN,
    History,
    NextProbe,
    OutcomeCounts,
    SearchAnswer,
    _Belief,
    _buildable,
    _information,
    _next_probes,
    _prove_ends,
    believe,
)


def chain(count: int) -> History:
    return History([str(i) for i in range(count)], [[i - 1] if i else [] for i in range(count)])


class Run:
    """A bisection of a history with a known culprit."""

    def __init__(
        self, history: History, is_bad: Callable[[int], bool], noise: float = 0.0, broken: Collection[int] = (),
        seed: int = 0, one_sided: bool = False, confidence: float = 0.95, at_once: int = 1,
    ) -> None:  # fmt: skip
        self.history, self._is_bad, self._broken, self._confidence = history, is_bad, broken, confidence
        self._at_once, self.rounds = at_once, 0
        self._good_as_bad, self._bad_as_good = (0.0 if one_sided else noise), noise
        self._random = random.Random(seed)
        self.asked: list[tuple[str, int]] = []
        self.counts: dict[str, OutcomeCounts] = {}
        self.skipped: set[str] = set()
        self.good = OutcomeCounts()
        bad = OutcomeCounts()
        while (end := _prove_ends(self.good, bad, 1)) in ("probe-good", "probe-bad"):
            if end == "probe-good":
                self.good = self._more(self.good, False)
            else:
                bad = self._more(bad, True)
        self.proven = end == "proven"
        self.counts[history.commits[-1]] = bad

    def _more(self, count: OutcomeCounts, bad: bool) -> OutcomeCounts:
        wrong = self._random.random() < (self._bad_as_good if bad else self._good_as_bad)
        seen_bad = bad ^ wrong
        return OutcomeCounts(count.good + (not seen_bad), count.bad + seen_bad)

    def round(self) -> SearchAnswer | None:
        step = _next_probes(self.history, self.counts, self.skipped, self.good, self._confidence, self._at_once)
        if isinstance(step, SearchAnswer):
            return step
        assert 1 <= len(step) <= self._at_once
        self.rounds += 1
        for probe in step:
            i = self.history.index[probe.commit]
            self.asked.append((probe.purpose, i))
            if i in self._broken:
                self.skipped.add(probe.commit)
            else:
                self.counts[probe.commit] = self._more(self.counts.get(probe.commit, OutcomeCounts()), self._is_bad(i))
        return None

    def end(self) -> SearchAnswer:
        while (step := self.round()) is None:
            pass
        return step

    @property
    def probes(self) -> int:
        """All probes that classified a commit, those of the ends included."""
        return self.good.total + sum(count.total for count in self.counts.values())

    @property
    def searched(self) -> int:
        return sum(purpose == "search" for purpose, _ in self.asked)


@settings(max_examples=40)
@given(st.integers(1, 300), st.data())
def test_a_straight_history_costs_log2_n_probes(count: int, data: st.DataObject) -> None:
    culprit = data.draw(st.integers(0, count - 1))
    run = Run(chain(count), lambda i: i >= culprit)
    end = run.end()
    assert (end.outcome, end.commits) == ("found", (str(culprit),))
    assert end.confidence >= 0.95
    assert run.searched <= math.ceil(math.log2(count)) + 1
    assert run.probes <= math.log2(count) + 9


@pytest.mark.parametrize("seed", range(8))
def test_a_history_with_merges(histories: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    parents = histories.merging(200, rng)
    history = History([str(i) for i in range(len(parents))], parents).upto(len(parents) - 1)
    culprit = rng.randrange(len(history))
    run = Run(history, lambda i: bool(history.ancestors(i)[culprit]))
    end = run.end()
    assert (end.outcome, end.commits) == ("found", (history.commits[culprit],))
    # An unbalanced graph has no commit with exactly half of the candidates behind it; git allows one more step, too.
    assert run.searched <= math.ceil(math.log2(len(history))) + 2
    for parent in history.parents[culprit]:
        assert history.commits[parent] in run.counts, "each parent was probed, not only inferred"


def test_broken_commits_cost_their_probe_and_no_more() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        culprit = rng.randrange(1, 300)
        broken = {i for i in range(299) if rng.random() < 0.1} - {culprit - 1, culprit}
        run = Run(chain(300), lambda i, c=culprit: i >= c, broken=broken)  # type: ignore[misc]
        end = run.end()
        assert (end.outcome, end.commits) == ("found", (str(culprit),))
        assert run.searched <= math.ceil(math.log2(300)) + 1 + len(run.skipped)


def test_a_long_break_is_left_in_doubling_steps() -> None:
    run = Run(chain(1000), lambda i: i >= 700, broken=range(400, 600))
    end = run.end()
    assert (end.outcome, end.commits) == ("found", ("700",))
    assert len(run.skipped) <= 10, f"{len(run.skipped)} of 200 broken commits were tried"


def test_commits_that_skips_make_indistinguishable_are_a_range() -> None:
    run = Run(chain(64), lambda i: i >= 20, broken=[18, 19, 20, 21])
    end = run.end()
    assert end.outcome == "ambiguous"
    assert end.commits == ("18", "19", "20", "21", "22")


def test_a_broken_commit_can_be_found_through_its_children() -> None:
    # 0 - 1 - 2 - 4 with 1 - 3 - 4: only the culprit 1, which does not build, explains that both 2 and 3 are bad.
    history = History(["0", "1", "2", "3", "4"], [[], [0], [1], [1], [2, 3]])
    end = Run(history, lambda i: i >= 1, broken=[1]).end()
    assert (end.outcome, end.commits) == ("found", ("1",))


@pytest.mark.few(2)
@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize(("noise", "one_sided", "most_wrong"), [(0.1, False, 5), (0.5, True, 5), (0.1, True, 2)])
def test_flaky_outcomes_still_find_the_culprit(noise: float, one_sided: bool, most_wrong: int, at_once: int) -> None:
    wrong = 0
    history = chain(200)
    for seed in range(40):
        culprit = random.Random(seed).randrange(200)
        run = Run(
            history,
            lambda i, c=culprit: i >= c,
            noise=noise,
            seed=seed,
            one_sided=one_sided,
            at_once=at_once,  # type: ignore[misc]
        )
        if run.proven:
            end = run.end()
            wrong += end.commits != (str(culprit),)
    assert wrong <= most_wrong


def test_random_outcomes_end_as_too_flaky() -> None:
    run = Run(chain(50), lambda i: i >= 20, noise=0.5, seed=3)
    run.counts["49"], run.good = OutcomeCounts(0, 1), OutcomeCounts(1, 0)
    assert run.end().outcome == "flaky"


def test_one_transition_of_several_is_found() -> None:
    run = Run(chain(100), lambda i: 10 <= i < 30 or i >= 70)
    end = run.end()
    assert end.outcome == "found"
    assert end.commits in (("10",), ("70",))


def test_a_merge_that_fixes_a_parent_is_not_taken_for_flips() -> None:
    # 1 is bad; its child 2 is good again; 4 merges 2 and 3. Of 4's parents, 2 was fixed and 1 has a culprit of its own.
    history = History(["0", "1", "2", "3", "4"], [[], [0], [1], [0], [2, 3]])
    bad = {1, 4}
    run = Run(history, lambda i: i in bad)
    end = run.end()
    assert end.outcome == "found"
    [culprit] = end.commits
    assert int(culprit) in bad
    assert culprit in run.counts
    for parent in history.parents[int(culprit)]:
        assert not run.counts[str(parent)].is_bad


def next_commit(counts: dict[str, OutcomeCounts], skipped: Collection[str] = ()) -> str:
    step = _next_probes(chain(20), counts, skipped, OutcomeCounts(3, 0), 0.99)
    assert not isinstance(step, SearchAnswer)
    [probe] = step
    return probe.commit


def test_confirmed_contradictions_narrow_the_range() -> None:
    # 5 came out bad and 8 good, both twice, and nothing flips: there is a culprit among 0 to 5.
    counts = {"19": OutcomeCounts(0, 3), "5": OutcomeCounts(0, 2), "8": OutcomeCounts(2, 0)}
    assert int(next_commit(counts)) < 5
    counts["5"] = OutcomeCounts(0, 1)
    assert _next_probes(chain(20), counts, (), OutcomeCounts(3, 0), 0.99) == (NextProbe("5", "verify"),)
    # What cannot be probed any more is not asked for again, for ever.
    assert int(next_commit(counts, skipped={"5"})) < 5


@pytest.mark.parametrize(
    ("good", "bad", "step"),
    [
        ((0, 0), (0, 0), "probe-good"),
        ((1, 0), (0, 0), "probe-bad"),
        ((1, 0), (0, 1), "proven"),
        ((1, 0), (3, 0), "probe-bad"),
        ((1, 0), (MAX_UNSEEN, 0), "bad-refuted"),
        ((0, 2), (0, 1), "probe-good"),
        ((0, MAX_UNSEEN), (0, 1), "good-refuted"),
        ((1, 0), (1, 1), "probe-good"),
        ((4, 0), (1, 3), "proven"),
        ((5, 5), (5, 6), "probe-good"),
        ((MAX_END_PROBES - 12, 12), (12, MAX_END_PROBES - 12), "flaky"),
    ],
)
def test_ends_are_proven_by_the_rates_at_which_they_come_out_bad(good: tuple[int, int], bad: tuple[int, int], step: str) -> None:
    assert _prove_ends(OutcomeCounts(*good), OutcomeCounts(*bad), 1) == step


def test_each_end_is_probed_as_often_as_asked() -> None:
    assert _prove_ends(OutcomeCounts(1, 0), OutcomeCounts(0, 3), 3) == "probe-good"
    assert _prove_ends(OutcomeCounts(3, 0), OutcomeCounts(0, 3), 3) == "proven"


@pytest.mark.parametrize("at_once", [2, 3, 7])
def test_a_batch_divides_a_straight_history_into_parts(at_once: int) -> None:
    step = _next_probes(chain(960), {"959": OutcomeCounts(0, 9)}, (), OutcomeCounts(9, 0), 0.95, at_once)
    assert not isinstance(step, SearchAnswer)
    cuts = sorted(int(probe.commit) + 1 for probe in step)
    parts = np.diff([0, *cuts, 960])
    assert len(parts) == at_once + 1
    assert {probe.purpose for probe in step} == {"search"}
    # One cut after the other halves a part: 2 leave a half. Bad commits come out good a little more often than the reverse.
    assert parts.max() <= 1.1 * 960 / 2 ** int(math.log2(at_once + 1))


def test_a_history_of_1000_commits_takes_7_workers_4_rounds() -> None:
    history = chain(999)
    rounds = []
    for seed in range(12):
        culprit = random.Random(seed).randrange(999)
        run = Run(history, lambda i, c=culprit: i >= c, at_once=7)  # type: ignore[misc]
        assert run.end().commits == (str(culprit),)
        rounds.append(run.rounds)
    assert np.mean(rounds) <= 4


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_in_a_history_with_merges_and_broken_commits(histories: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    parents = histories.merging(200, rng)
    history = History([str(i) for i in range(len(parents))], parents).upto(len(parents) - 1)
    culprit = rng.randrange(len(history))
    near = {culprit, *history.parents[culprit], len(history) - 1}
    broken = {i for i in range(len(history)) if rng.random() < 0.1} - near
    run = Run(history, lambda i: bool(history.ancestors(i)[culprit]), broken=broken, at_once=7)
    end = run.end()
    assert (end.outcome, end.commits) == ("found", (history.commits[culprit],))
    assert run.rounds <= 6
    for parent in history.parents[culprit]:
        assert history.commits[parent] in run.counts, "each parent was probed, not only inferred"


def test_what_is_left_to_verify_is_verified_at_once() -> None:
    # 4 merges 0 and 1, and 2 and 3 are children of these. That 0 and 1 are good is only inferred from 2 and 3.
    history = History(list("012345"), [[], [], [0], [1], [0, 1], [2, 3, 4]])
    counts = {"5": OutcomeCounts(0, 3), "4": OutcomeCounts(0, 4), "2": OutcomeCounts(4, 0), "3": OutcomeCounts(4, 0)}
    verify = (NextProbe("0", "verify"), NextProbe("1", "verify"))
    assert _next_probes(history, counts, (), OutcomeCounts(9, 0), 0.95, 7) == verify
    assert _next_probes(history, counts, (), OutcomeCounts(9, 0), 0.95) == verify[:1]
    assert _next_probes(history, counts, {"0"}, OutcomeCounts(9, 0), 0.95, 7) == verify[1:]


def test_what_a_batch_adds_by_hand() -> None:
    # Four suspects in a line, nothing flips. The middle is under way: each quarter adds its half of a bit, the middle nothing more.
    history, belief = chain(4), _Belief(np.full(4, 0.25), np.ones(4, dtype=bool), np.zeros(4), np.zeros(4))
    middle_bad = history.ancestors(1)[:, None]
    joint = belief.weights[:, None] * np.hstack([middle_bad, ~middle_bad])
    assert _information(history, belief, joint).tolist() == pytest.approx([0.5, 0, 0.5, 0])
    # Where outcomes are wrong one time in ten, a second one of the middle still adds: the information of two minus that of one.
    noisy = _Belief(belief.weights, belief.consistent, np.full(4, 0.1), np.full(4, 0.1))
    bad = np.where(middle_bad, 0.9, 0.1)
    again = _information(history, noisy, noisy.weights[:, None] * np.hstack([bad, 1 - bad]))
    both = [0.5 * (0.81 + 0.01), 0.18, 0.5 * (0.81 + 0.01)]  # bad twice, apart, good twice; "apart" is two outcomes
    entropy = -sum(p * math.log2(p) for p in (both[0], both[1] / 2, both[1] / 2, both[2]))
    one = -(0.1 * math.log2(0.1) + 0.9 * math.log2(0.9))
    assert again[1] == pytest.approx(entropy - 2 * one - (1 - one))


def test_belief_by_hand() -> None:
    # Two suspects, two bad outcomes at the older one.
    belief = believe(chain(2), {"0": OutcomeCounts(0, 2), "1": OutcomeCounts(0, 1)}, OutcomeCounts(1, 0))

    def evidence(prior: tuple[float, float, float], wrong: int, right: int) -> float:
        def beta(a: float, b: float) -> float:
            return math.gamma(a) * math.gamma(b) / math.gamma(a + b)

        zero, a, b = prior
        return zero * (wrong == 0) + (1 - zero) * beta(a + wrong, b + right) / beta(a, b)

    likelihood = [
        evidence(search._GOOD_AS_BAD, wrong_bad, right_good) * evidence(search._BAD_AS_GOOD, 0, right_bad)
        for wrong_bad, right_good, right_bad in ((0, 1, 3), (2, 1, 1))
    ]
    assert belief.weights == pytest.approx(np.array(likelihood) / sum(likelihood))
    assert belief.consistent.tolist() == [True, False]


def test_an_outcome_carries_what_a_noisy_channel_lets_through() -> None:
    def belief(good_as_bad: float, bad_as_good: float) -> _Belief:
        rates = [np.full(2, rate) for rate in (good_as_bad, bad_as_good)]
        return _Belief(np.array([0.5, 0.5]), np.array([True, True]), *rates)

    def bits(good_as_bad: float, bad_as_good: float) -> list[float]:
        return _information(chain(2), belief(good_as_bad, bad_as_good)).tolist()

    # The first commit is bad with probability one half; the second certainly is.
    assert bits(0.0, 0.0) == pytest.approx([1, 0])
    assert bits(0.5, 0.5) == pytest.approx([0, 0])
    assert bits(0.1, 0.1) == pytest.approx([1 - 0.4690, 0], abs=1e-4)  # the capacity of that channel


def test_commits_next_to_broken_ones_are_less_likely_to_build() -> None:
    builds = _buildable(chain(20), {"19": OutcomeCounts(0, 1)}, {"10"})
    assert builds[9] == builds[11] == 0.5
    assert builds[12] == pytest.approx(2 / 3)
    assert (np.diff(builds[11:19]) > 0).all()
    more = _buildable(chain(20), {}, {"10", "11", "12"})
    assert more[13] == pytest.approx(1 / 5)


def test_ancestors_and_mass_agree(histories: ModuleType) -> None:
    parents = histories.merging(60, random.Random(4))
    history = History([str(i) for i in range(len(parents))], parents)
    for i in range(len(history)):
        behind = {i}
        for j in range(i, -1, -1):
            if j in behind:
                behind |= set(parents[j])
        assert set(np.flatnonzero(history.ancestors(i)).tolist()) == behind
        assert history.mass(np.ones(len(history)))[i] == len(behind)
        below = {j for j in range(len(history)) if history.ancestors(j)[i]}
        assert below == histories.descendants(parents, i)
    with pytest.raises(ValueError, match="comes before"):
        History(["a", "b"], [[1], []])
