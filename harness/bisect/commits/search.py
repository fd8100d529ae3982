"""The choice of the next probes, and when to stop: probabilistic bisection over a history with merges.

The culprit is one commit of the range; a commit is bad if it is the culprit or descends from it. A probe may misclassify: good
commits come out bad with one unknown rate, bad ones good with another. Either rate is zero, as in most histories, or has a Beta
prior; it is integrated out, so the probability of each suspect given all outcomes has a closed form. Where both are zero, a suspect
that an outcome contradicts is out.

The next probe is the commit whose outcome carries the most information about the culprit: Horstein's scheme (Sequential
transmission using noiseless feedback, IEEE Transactions on Information Theory 9, 136-143 (1963); convergence: Waeber, Frazier &
Henderson, Bisection search with noisy responses, SIAM Journal on Control and Optimization 51, 2261-2279 (2013)). While nothing
contradicts, that is plain bisection; one search serves steady and flaky histories alike. Simpler rules cost flaky histories 9 to 11
probes more on average where outcomes are wrong one time in ten: the commit whose outcome is nearest to even odds, and the rates of
all suspects in place of each suspect's own (``benchmarks/commit_bisection.py --only simulated --commits 300 --runs 60``).

Several probes at once are a batch whose outcomes together carry the most: each is chosen as if those chosen before it were under
way, their outcomes unknown. Outcomes are independent once the culprit is known, so their information is submodular, and this greedy
choice has at least 1 - 1/e of the best batch's (Krause & Guestrin, Near-optimal nonmyopic value of information in graphical models,
UAI 2005). On a straight, steady history k probes divide the suspects into k + 1 parts, even ones where that is a power of two.

Pure: no git, no clock. The next step follows from the outcomes alone, so a bisection can be resumed from a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, xlogy

_JEFFREYS = 0.5
"""Both parameters of Jeffreys' prior for a rate: Beta(1/2, 1/2)."""
_END_CONFIDENCE = 0.9
"""The ends are proven once the bad revision comes out bad more often than the good one with this probability. One outcome of
each that is as stated gives 0.905."""
MAX_UNSEEN = 7
"""Outcomes of an end, none of them as stated, after which it is not what the user stated. A bad revision that fails half the time
is refused in 1 of 128 bisections."""
MAX_END_PROBES = 25
"""Outcomes of each end after which both count as too flaky."""
_MIN_CONTRADICTIONS = 2
"""Bad outcomes a commit needs before it may contradict the assumption that the history is monotone."""
_NEGLIGIBLE_BITS = 1e-9
"""Information below which a probe is not worth its time; the rest is rounding."""
_MOST_OUTCOMES = 256
"""Outcomes of a batch that are told apart while it is chosen, the likeliest: of k probes there are 2^k, most next to impossible."""

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


_GOOD_AS_BAD, _BAD_AS_GOOD = (0.7, 1, 6), (0.45, 1, 2)
"""Priors of the two rates: the probability that it is zero, and the parameters of its Beta distribution otherwise. Chosen by
simulation (``benchmarks/commit_bisection.py --only simulated``): more weight on zero saves probes of steady histories and names
more wrong commits in flaky ones."""


@dataclass(frozen=True)
class OutcomeCounts:
    """The numbers of times that a commit came out good and bad."""

    good: int = 0
    bad: int = 0

    def __add__(self, more: OutcomeCounts) -> OutcomeCounts:
        return OutcomeCounts(self.good + more.good, self.bad + more.bad)

    @property
    def total(self) -> int:
        """Probes that classified it."""
        return self.good + self.bad

    @property
    def mixed(self) -> bool:
        """True if it came out both ways."""
        return bool(self.good and self.bad)

    @property
    def is_bad(self) -> bool:
        """True if it came out bad more often than good."""
        return self.bad > self.good


class History:
    """Commits that may be the culprit: those reachable from the bad revision but not from the good one.

    Stores ancestry as n x n bits: 125 kB for 1,000 commits, 50 MB for 20,000.
    """

    def __init__(self, commits: Sequence[str], parents: Sequence[Sequence[int]]) -> None:
        """Take commits with the indices of their parents within the range; parents before children, the bad revision last.

        Raises:
            ValueError: there is none, or a parent does not come before its child.
        """
        if not commits:
            raise ValueError("a history of no commits; expected at least the bad revision")
        self.commits = tuple(commits)
        self.parents = tuple(tuple(p) for p in parents)
        self.index = {commit: i for i, commit in enumerate(self.commits)}
        self._bits = np.zeros((len(commits), (len(commits) + 7) // 8), dtype=np.uint8)
        for i, row in enumerate(self._bits):
            row[i >> 3] = 128 >> (i & 7)
            for p in self.parents[i]:
                if p >= i:
                    raise ValueError(f"commit {i} has the parent {p}, expected one that comes before it")
                row |= self._bits[p]

    def __len__(self) -> int:
        return len(self.commits)

    def ancestors(self, i: int) -> Booleans:
        """Return which commits are commit i or one of its ancestors; bool [n]."""
        return np.unpackbits(self._bits[i], count=len(self)).astype(bool)

    def _unpacked(self, rows: NDArray[np.int64]) -> Iterator[Booleans]:
        """Yield the ancestors of some commits, in blocks of rows: unpacked bits take eight times the memory; bool [<= 512, n]."""
        for start in range(0, len(rows), 512):
            yield np.unpackbits(self._bits[rows[start : start + 512]], axis=1, count=len(self)).astype(bool)

    def mass(self, weights: Floats) -> Floats:
        """Sum the weights of each commit's ancestors, itself included; float64, in the shape of `weights`: [n] or [n, k]."""
        return np.concatenate([block @ weights for block in self._unpacked(np.arange(len(self)))])

    def upto(self, i: int) -> History:
        """Return the history that ends with commit i: its ancestors and itself."""
        kept = np.flatnonzero(self.ancestors(i)).tolist()
        place = {old: new for new, old in enumerate(kept)}
        return History([self.commits[k] for k in kept], [[place[p] for p in self.parents[k]] for k in kept])

    def indistinguishable(self, i: int, probed: Booleans) -> Booleans:
        """Return which commits no probe of the commits in `probed` (bool [n]) can distinguish from commit i; bool [n]."""
        same = np.ones(len(self), dtype=bool)
        for block in self._unpacked(np.flatnonzero(probed)):
            same &= (block == block[:, [i]]).all(axis=0)
        return same


@dataclass(frozen=True)
class NextProbe:
    """Probe this commit: to prove an end, to search, to confirm the last remaining suspect, or to verify what was only inferred."""

    commit: str
    purpose: Literal["good-end", "bad-end", "search", "confirm", "verify"]


@dataclass(frozen=True)
class SearchAnswer:
    """The end of a search.

    Attributes:
        outcome: the culprit was "found"; or it is one of the commits, which are "ambiguous" because skipped ones make them
            indistinguishable; or there were too many probes without a result: the outcomes are too "flaky".
        commits: the culprit, or the suspects: oldest first, and of a flaky search the likeliest first.
        confidence: probability that the culprit is among them, of a flaky search that it is the first.
    """

    outcome: Literal["found", "ambiguous", "flaky"]
    commits: tuple[str, ...]
    confidence: float


@dataclass(frozen=True)
class _Belief:
    """The state of knowledge after some outcomes.

    Attributes:
        weights: probability of each suspect, float64 [n].
        consistent: suspects that no outcome contradicts, bool [n].
        good_as_bad: if that suspect is the culprit, the expected rate at which a good commit comes out bad, float64 [n].
        bad_as_good: the same for a bad commit that comes out good, float64 [n].
    """

    weights: Floats
    consistent: Booleans
    good_as_bad: Floats
    bad_as_good: Floats

    @property
    def rates(self) -> tuple[float, float]:
        """Expected rates at which a good commit comes out bad and a bad one good, over all suspects."""
        return float(self.weights @ self.good_as_bad), float(self.weights @ self.bad_as_good)


def believe(history: History, counts: Mapping[str, OutcomeCounts], good: OutcomeCounts) -> _Belief:
    """Compute the probability of each suspect given all outcomes.

    Args:
        history: the suspects, equally likely a priori.
        counts: outcomes by commit; commits outside `history` are ignored.
        good: outcomes of the good revision, which precedes every suspect.
    """
    right_bad, wrong_good = np.zeros(len(history)), np.zeros(len(history))
    total = OutcomeCounts()
    for commit, count in counts.items():
        if commit in history.index:
            # If the suspect is an ancestor, this commit is bad.
            above = history.ancestors(history.index[commit])
            right_bad[above] += count.bad
            wrong_good[above] += count.good
            total += count
    good_logs, good_as_bad = _rate(_GOOD_AS_BAD, total.bad - right_bad + good.bad, total.good - wrong_good + good.good)
    bad_logs, bad_as_good = _rate(_BAD_AS_GOOD, wrong_good, right_bad)
    logs = good_logs + bad_logs
    weights = np.exp(logs - logs.max())
    consistent = (wrong_good == 0) & (total.bad + good.bad == right_bad)
    return _Belief(weights / weights.sum(), consistent, good_as_bad, bad_as_good)


def _rate(prior: tuple[float, float, float], wrong: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Compute the log-probability of the outcomes and the expected rate of wrong ones, by suspect; each [n]."""
    zero, a, b = prior
    flaky = math.log(1 - zero) + betaln(a + wrong, b + right) - betaln(a, b)
    logs = np.logaddexp(np.where(wrong == 0, math.log(zero), -np.inf), flaky)
    return logs, np.exp(flaky - logs) * (a + wrong) / (a + b + wrong + right)


@dataclass(frozen=True)
class End:
    """One of the two revisions that the user gave.

    Attributes:
        commit: which.
        seen: outcomes of its probes as an end: ends that were proven stay so when a bisection is resumed.
    """

    commit: str
    seen: OutcomeCounts


Refuted = Literal["good-refuted", "bad-refuted", "flaky"]
EndStep = Literal["probe-good", "probe-bad", "proven"] | Refuted
_PROBED_END: Mapping[EndStep, tuple[int, Literal["good-end", "bad-end"], OutcomeCounts]] = {
    "probe-good": (0, "good-end", OutcomeCounts(good=1)),
    "probe-bad": (1, "bad-end", OutcomeCounts(bad=1)),
}
"""Steps that probe an end: which one, as what, and the outcome that the user stated."""


def next_round(
    history: History,
    counts: Mapping[str, OutcomeCounts],
    skipped: Collection[str],
    good: OutcomeCounts,
    ends: tuple[End, End],
    repeats: int,
    confidence: float,
    most: int,
) -> tuple[NextProbe, ...] | SearchAnswer | Refuted:
    """Choose what to probe at once: the ends until they are proven, and with what is left of `most`, as if they will be, commits.

    Args:
        history: see `_next_probes`, as for `counts`, `skipped`, `good` and `confidence`.
        counts: see there.
        skipped: see there.
        good: see there.
        ends: the good and the bad revision.
        repeats: fewest outcomes of each.
        confidence: see there.
        most: most probes at once.
    """
    probes, stated = list[NextProbe](), [OutcomeCounts(), OutcomeCounts()]
    while True:
        step = _prove_ends(ends[0].seen + stated[0], ends[1].seen + stated[1], repeats)
        if step not in _PROBED_END or len(probes) == most:
            break
        which, purpose, outcome = _PROBED_END[step]
        probes.append(NextProbe(ends[which].commit, purpose))
        stated[which] += outcome
    if step == "proven" and len(probes) < most:
        bad = ends[1].commit
        counts = {**counts, bad: counts.get(bad, OutcomeCounts()) + stated[1]}
        answer = _next_probes(history, counts, skipped, good + stated[0], confidence, most - len(probes))
        if isinstance(answer, SearchAnswer):
            return tuple(probes) or answer
        return (*probes, *answer)
    assert probes or step in get_args(Refuted), step
    return tuple(probes) or cast(Refuted, step)


def _prove_ends(good: OutcomeCounts, bad: OutcomeCounts, repeats: int) -> EndStep:
    """Choose which end to probe next, or prove that the bad revision comes out bad more often than the good one.

    Args:
        good: outcomes of the good revision.
        bad: outcomes of the bad revision.
        repeats: fewest outcomes of each.
    """
    if good.total < repeats:
        return "probe-good"
    if bad.total < repeats:
        return "probe-bad"
    if _more_often_bad(bad, good) >= _END_CONFIDENCE:
        return "proven"
    for end, as_stated, total in (("good", good.good, good.total), ("bad", bad.bad, bad.total)):
        if not as_stated:
            refuted: EndStep = "good-refuted" if end == "good" else "bad-refuted"
            again: EndStep = "probe-good" if end == "good" else "probe-bad"
            return refuted if total >= MAX_UNSEEN else again
    if good.total >= MAX_END_PROBES and bad.total >= MAX_END_PROBES:
        return "flaky"
    return "probe-good" if good.total <= bad.total else "probe-bad"


def _more_often_bad(counts: OutcomeCounts, other: OutcomeCounts) -> float:
    """Compute the probability that the first commit is bad at a higher rate than the second, with Jeffreys' prior on each."""
    edges = np.linspace(0.0, 1.0, 2001)
    below = betainc(_JEFFREYS + other.bad, _JEFFREYS + other.good, edges)
    mass = np.diff(betainc(_JEFFREYS + counts.bad, _JEFFREYS + counts.good, edges))
    return float(mass @ (below[1:] + below[:-1]) / 2)


def _next_probes(
    history: History,
    counts: Mapping[str, OutcomeCounts],
    skipped: Collection[str],
    good: OutcomeCounts,
    confidence: float,
    most: int = 1,
) -> tuple[NextProbe, ...] | SearchAnswer:
    """Choose the next probes, which can be made at once, or end the search.

    Args:
        history: the range.
        counts: outcomes by commit, including the bad revision's.
        skipped: commits that cannot be probed (any more: outcomes they already have still count).
        good: outcomes of the good revision.
        confidence: probability at which a commit is named.
        most: most probes at once; the same commit may be among them more than once.
    """
    mixed = good.mixed or any(count.mixed for count in counts.values())
    while True:
        known = {commit: count for commit, count in counts.items() if commit in history.index}
        belief = believe(history, known, good)
        if not belief.consistent.any() and not mixed:
            # Each commit agrees with itself, but no single culprit explains them all: the history is not monotone. The bad
            # commit with the shortest history has a culprit of its own.
            first = min(
                (c for c, t in known.items() if t.is_bad), key=lambda c: history.ancestors(history.index[c]).sum()
            )
            if known[first].bad < _MIN_CONTRADICTIONS and first not in skipped:
                return (NextProbe(first, "verify"),)
            history = history.upto(history.index[first])
            continue
        step = _search(history, known, skipped, belief, confidence, most)
        if not isinstance(step, SearchAnswer) or step.outcome != "found":
            return step
        culprit = history.index[step.commits[0]]
        inferred = [history.commits[i] for i in (culprit, *history.parents[culprit]) if history.commits[i] not in known]
        return tuple(NextProbe(commit, "verify") for commit in inferred if commit not in skipped)[:most] or step


def _search(
    history: History,
    known: Mapping[str, OutcomeCounts],
    skipped: Collection[str],
    belief: _Belief,
    confidence: float,
    most: int,
) -> tuple[NextProbe, ...] | SearchAnswer:
    available = np.array([commit not in skipped for commit in history.commits])
    probed = np.array([commit in known for commit in history.commits])
    best = int(belief.weights.argmax())
    same = history.indistinguishable(best, available | probed)
    probability = float(belief.weights[same].sum())
    if probability >= confidence:
        suspects = tuple(history.commits[i] for i in np.flatnonzero(same))
        return SearchAnswer("found" if len(suspects) == 1 else "ambiguous", suspects, probability)
    likely = np.argsort(-belief.weights)[:10]
    flaky = SearchAnswer("flaky", tuple(history.commits[i] for i in likely), probability)
    # Far more than probes that are wrong one time in ten need.
    if sum(count.total for count in known.values()) > 50 + 40 * math.log2(len(history) + 1):
        return flaky
    builds = np.where(available, _buildable(history, known, skipped), 0.0)
    chosen = _batch(history, belief, builds, most)
    probes = [
        NextProbe(history.commits[i], "confirm" if probed[i] or i in chosen[:place] else "search")
        for place, i in enumerate(chosen)
    ]
    return tuple(probes) or flaky


def _batch(history: History, belief: _Belief, builds: Floats, most: int) -> list[int]:
    """Choose up to so many commits whose outcomes together carry the most; empty if none carries anything."""
    chosen, joint = list[int](), belief.weights[:, None]
    while len(chosen) < most:
        gain = _information(history, belief, joint) * builds
        if gain.max() <= _NEGLIGIBLE_BITS:
            break
        chosen.append(int(gain.argmax()))
        bad = np.where(history.ancestors(chosen[-1]), 1 - belief.bad_as_good, belief.good_as_bad)[:, None]
        joint = np.hstack([joint * bad, joint * (1 - bad)])
        joint = joint[:, np.argsort(-joint.sum(axis=0))[:_MOST_OUTCOMES]]
    return chosen


def _buildable(history: History, known: Mapping[str, OutcomeCounts], skipped: Collection[str]) -> Floats:
    """Estimate how likely each commit is to build, relative to one far from any that does not; float64 [n].

    Breakage persists over several commits: at distance d from k broken ones with no working one in between, d / (d + 2^(k - 1)),
    so the step away doubles with each further broken commit. Distances are in topological order.
    """
    builds = np.ones(len(history))
    for order in (range(len(history)), range(len(history) - 1, -1, -1)):
        run, last = 0, 0
        for i in order:
            commit = history.commits[i]
            if commit in skipped:
                run, last = run + 1, i
            elif commit in known:
                run = 0
            elif run:
                distance = abs(i - last)
                builds[i] *= distance / (distance + 2.0 ** (run - 1))
    return builds


def _information(history: History, belief: _Belief, joint: Floats | None = None) -> Floats:
    """Compute the bits that one more outcome of each commit carries about which suspect is the culprit; float64 [n].

    The entropy of the outcome minus its expected entropy if the culprit were known, with each suspect's own expected rates.

    Args:
        history: the suspects.
        belief: in each of them.
        joint: probability of each suspect together with each outcome of the probes under way, float64 [n, m]; by default there are
            none, and m is 1. What it leaves out counts as no information.
    """
    weights, as_bad, as_good = belief.weights, belief.good_as_bad, belief.bad_as_good
    joint = weights[:, None] if joint is None else joint
    # If the suspect is an ancestor the commit is bad, else it is good.
    seen_bad = history.mass(joint * (1 - as_good - as_bad)[:, None]) + as_bad @ joint
    noise = history.mass((joint * (_entropy(as_good) - _entropy(as_bad))[:, None]).sum(axis=1, keepdims=True))
    noise = noise[:, 0] + _entropy(as_bad) @ joint.sum(axis=1)
    likely = joint.sum(axis=0)
    entropy = _entropy(np.clip(seen_bad / likely, 0, 1)) @ likely
    return np.asarray(np.maximum(entropy - noise, 0.0))


def _entropy(p: Floats) -> Floats:
    return np.asarray(-(xlogy(p, p) + xlogy(1 - p, 1 - p)) / math.log(2), dtype=np.float64)
