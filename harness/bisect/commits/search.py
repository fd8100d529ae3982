"""What to probe next, and when to stop: probabilistic bisection over a history with merges.

The culprit is one commit of the range; a commit is bad if it is the culprit or descends from it. A probe may misclassify: good
commits come out bad with one unknown probability, bad ones good with another. Both have Jeffreys' prior, Beta(1/2, 1/2), and are
integrated out, so the probability of each suspect given all outcomes has a closed form (Beta-Bernoulli). Probing where an
outcome carries the most information about the culprit is Horstein's scheme (Sequential transmission using noiseless feedback,
IEEE Transactions on Information Theory 9, 136-143 (1963); Burnashev & Zigangirov 1974; convergence: Waeber, Frazier & Henderson,
Bisection search with noisy responses, SIAM Journal on Control and Optimization 51, 2261-2279 (2013)). As long as no two outcomes
contradict each other, suspects that an outcome excludes are treated as excluded: plain bisection, at log2(n) probes. The
confidence stated at the end always allows for misclassification.

Pure: no git, no clock. The next step follows from the outcomes alone, so a bisection can be resumed from a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, xlogy

JEFFREYS = 0.5
"""Both parameters of Jeffreys' prior for a probability: Beta(1/2, 1/2)."""
END_CONFIDENCE = 0.95
"""An end whose outcomes differ is proven once its misclassification rate is below one half with this probability."""
MAX_END_PROBES = 25
"""Probes of an end after which it counts as too flaky."""
MIN_CONTRADICTIONS = 2
"""Bad outcomes a commit needs before it may contradict the assumption that the history is monotone."""
NEGLIGIBLE_BITS = 1e-9
"""Information below which a probe is not worth its time; the rest is rounding."""

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class OutcomeCounts:
    """How often a commit came out good and bad."""

    good: int = 0
    bad: int = 0

    @property
    def total(self) -> int:
        """Probes that classified it."""
        return self.good + self.bad

    @property
    def mixed(self) -> bool:
        """Whether it came out both ways."""
        return bool(self.good and self.bad)

    @property
    def is_bad(self) -> bool:
        """Whether it came out bad more often than good."""
        return self.bad > self.good


class History:
    """Commits that may be the culprit: those reachable from the bad revision but not from the good one.

    Stores ancestry as n x n bits: 125 kB for 1,000 commits, 50 MB for 20,000.

    """

    def __init__(self, commits: Sequence[str], parents: Sequence[Sequence[int]]) -> None:
        """Commits with the indices of their parents within the range; parents come before children, the bad revision last.

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
        """Which commits are commit i or an ancestor of it; bool [n]."""
        return np.unpackbits(self._bits[i], count=len(self)).astype(bool)

    def descendants(self, i: int) -> Booleans:
        """Which commits are commit i or a descendant of it; bool [n]."""
        return (self._bits[:, i >> 3] & (128 >> (i & 7))).astype(bool)

    def mass(self, weights: Floats) -> Floats:
        """Sum of the weights of each commit's ancestors, itself included; float64 [n]."""
        some = np.flatnonzero(weights)
        found = np.empty(len(self))
        for start in range(0, len(self), 512):  # in blocks: unpacked bits take eight times the memory
            rows = np.unpackbits(self._bits[start : start + 512], axis=1, count=len(self))
            found[start : start + 512] = rows[:, some] @ weights[some]
        return found

    def upto(self, i: int) -> History:
        """The history that ends with commit i: its ancestors and itself."""
        kept = np.flatnonzero(self.ancestors(i)).tolist()
        place = {old: new for new, old in enumerate(kept)}
        return History([self.commits[k] for k in kept], [[place[p] for p in self.parents[k]] for k in kept])

    def indistinguishable(self, i: int, probed: Booleans) -> Booleans:
        """Which commits probes of the commits in `probed` cannot distinguish from commit i (bool [n]); bool [n]."""
        same = np.ones(len(self), dtype=bool)
        own = self.descendants(i)
        rows = np.flatnonzero(probed)
        for start in range(0, len(rows), 512):
            block = rows[start : start + 512]
            unpacked = np.unpackbits(self._bits[block], axis=1, count=len(self)).astype(bool)
            same &= (unpacked == own[block][:, None]).all(axis=0)
        return same


@dataclass(frozen=True)
class NextProbe:
    """Probe this commit: to search, to confirm the last remaining suspect, or to verify what was only inferred."""

    commit: str
    purpose: Literal["search", "confirm", "verify"]


@dataclass(frozen=True)
class Found:
    """The culprit, and its probability."""

    commit: str
    confidence: float


@dataclass(frozen=True)
class Ambiguous:
    """The culprit is one of these commits, oldest first, with this probability; skipped commits make them indistinguishable."""

    commits: tuple[str, ...]
    confidence: float


@dataclass(frozen=True)
class TooFlaky:
    """Too many probes without a result: the outcomes are too flaky. The likeliest suspects, and the first one's probability."""

    commits: tuple[str, ...]
    confidence: float


Step = NextProbe | Found | Ambiguous | TooFlaky


@dataclass(frozen=True)
class Belief:
    """The state of knowledge after some outcomes.

    Attributes:
        weights: probability of each suspect, float64 [n].
        consistent: suspects that no outcome contradicts, bool [n].
        good_as_bad: expected probability that a good commit comes out bad.
        bad_as_good: expected probability that a bad commit comes out good.
    """

    weights: Floats
    consistent: Booleans
    good_as_bad: float
    bad_as_good: float


def believe(history: History, counts: Mapping[str, OutcomeCounts], good: OutcomeCounts) -> Belief:
    """Probability of each suspect given all outcomes.

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
            total = OutcomeCounts(total.good + count.good, total.bad + count.bad)
    wrong_bad, right_good = total.bad - right_bad + good.bad, total.good - wrong_good + good.good
    logs = betaln(JEFFREYS + wrong_good, JEFFREYS + right_bad) + betaln(JEFFREYS + wrong_bad, JEFFREYS + right_good)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()

    def expected(wrong: Floats, right: Floats) -> float:
        return float(weights @ ((JEFFREYS + wrong) / (2 * JEFFREYS + wrong + right)))

    return Belief(
        weights, (wrong_good == 0) & (wrong_bad == 0), expected(wrong_bad, right_good), expected(wrong_good, right_bad)
    )


def proof(
    count: OutcomeCounts, expected: Literal["good", "bad"], repeats: int
) -> Literal["more", "proven", "refuted", "flaky"]:
    """Whether the outcomes at an end of the range prove that it is what the user stated.

    Args:
        count: the outcomes so far.
        expected: what the user stated.
        repeats: outcomes that are needed if all agree.
    """
    right, wrong = (count.good, count.bad) if expected == "good" else (count.bad, count.good)
    if right + wrong < repeats:
        return "more"
    if not count.mixed:
        return "proven" if right else "refuted"
    below_half = float(betainc(JEFFREYS + wrong, JEFFREYS + right, 0.5))
    if below_half >= END_CONFIDENCE:
        return "proven"
    if below_half <= 1 - END_CONFIDENCE:
        return "refuted"
    return "flaky" if right + wrong >= MAX_END_PROBES else "more"


def next_step(
    history: History,
    counts: Mapping[str, OutcomeCounts],
    skipped: Collection[str],
    good: OutcomeCounts,
    confidence: float,
) -> Step:
    """The next step.

    Args:
        history: the range.
        counts: outcomes by commit, including the bad revision's.
        skipped: commits that cannot be probed (any more: outcomes they already have still count).
        good: outcomes of the good revision.
        confidence: probability at which a commit is named.
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
            if known[first].bad < MIN_CONTRADICTIONS:
                return NextProbe(first, "verify")
            history = history.upto(history.index[first])
            continue
        step = _search(history, known, skipped, belief, confidence)
        if isinstance(step, Found):
            own = history.index[step.commit]
            for commit in (step.commit, *(history.commits[p] for p in history.parents[own])):
                if commit not in known and commit not in skipped:
                    return NextProbe(commit, "verify")
        return step


def _search(
    history: History, known: Mapping[str, OutcomeCounts], skipped: Collection[str], belief: Belief, confidence: float
) -> Step:
    available = np.array([commit not in skipped for commit in history.commits])
    probed = np.array([commit in known for commit in history.commits])
    best = int(belief.weights.argmax())
    same = history.indistinguishable(best, available | probed)
    probability = float(belief.weights[same].sum())
    if probability >= confidence:
        if same.sum() == 1:
            return Found(history.commits[best], probability)
        return Ambiguous(tuple(history.commits[i] for i in np.flatnonzero(same)), probability)
    likely = np.argsort(-belief.weights)[:10]
    flaky = TooFlaky(tuple(history.commits[i] for i in likely), probability)
    if sum(count.total for count in known.values()) > _max_probes(len(history)):
        return flaky
    builds = np.where(available, buildable(history, known, skipped), 0.0)
    if belief.consistent.sum() > 1:
        share = history.mass(belief.consistent / belief.consistent.sum())
        gain = _entropy(np.clip(share, 0, 1)) * builds
        if gain.max() > NEGLIGIBLE_BITS:
            return NextProbe(history.commits[int(gain.argmax())], "search")
    gain = information(np.clip(history.mass(belief.weights), 0, 1), belief.good_as_bad, belief.bad_as_good) * builds
    if gain.max() <= NEGLIGIBLE_BITS:
        return flaky
    chosen = history.commits[int(gain.argmax())]
    return NextProbe(chosen, "confirm" if chosen in known or belief.consistent.any() else "search")


def _max_probes(commits: int) -> float:
    """Outcomes after which a search is too flaky: far beyond what probes that are wrong one time in ten need."""
    return 50 + 40 * math.log2(commits + 1)


def buildable(history: History, known: Mapping[str, OutcomeCounts], skipped: Collection[str]) -> Floats:
    """How likely each commit is to build, relative to a commit far from any that does not; float64 [n].

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


def information(share: Any, good_as_bad: float, bad_as_good: float) -> Floats:
    """Bits that an outcome carries about whether a commit is bad, which it is with probability `share`."""
    seen_bad = share * (1 - bad_as_good) + (1 - share) * good_as_bad
    noise = share * _entropy(np.array(bad_as_good)) + (1 - share) * _entropy(np.array(good_as_bad))
    return np.asarray(np.maximum(_entropy(seen_bad) - noise, 0.0), dtype=np.float64)


def _entropy(p: Floats) -> Floats:
    return np.asarray(-(xlogy(p, p) + xlogy(1 - p, 1 - p)) / math.log(2), dtype=np.float64)
