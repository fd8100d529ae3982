"""What to test next, and when to stop: probabilistic bisection over a history with merges.

The culprit is one commit of the range; a commit is bad if the culprit is among its ancestors or itself. A verdict may be wrong:
good commits are judged bad with one unknown probability, bad ones good with another. Both have Jeffreys' prior, Beta(1/2, 1/2), and
are integrated out, so the probability of each candidate given all verdicts has a closed form (Beta-Bernoulli). Asking where a
verdict tells most about the culprit is Horstein's scheme (Sequential transmission using noiseless feedback, IEEE Transactions on
Information Theory 9, 136-143 (1963); Burnashev & Zigangirov 1974; convergence: Waeber, Frazier & Henderson, Bisection search
with noisy responses, SIAM Journal on Control and Optimization 51, 2261-2279 (2013)). While no verdict has contradicted another
one, candidates that a verdict excludes are taken for excluded, which is plain bisection and costs log2(n) verdicts; what is
stated at the end still counts with flips.

Pure: no git, no clock. The next step follows from the verdicts alone, so a bisection can be gone on with from a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, xlogy

PRIOR = 0.5
"""Jeffreys' prior of a probability: Beta(1/2, 1/2)."""
PROVEN = 0.95
"""An end whose verdicts differ is proven once its flips are below one half with this probability."""
MOST_REPEATS = 25
"""Verdicts at an end after which it is too flaky to tell."""
FIRM = 2
"""Verdicts that a commit needs before it may contradict the assumption that the history is monotone."""

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Tally:
    """How often a commit was judged good and bad."""

    good: int = 0
    bad: int = 0

    @property
    def flipped(self) -> bool:
        """Whether it was judged both ways."""
        return bool(self.good and self.bad)

    @property
    def is_bad(self) -> bool:
        """Whether it was judged bad more often than good."""
        return self.bad > self.good


class History:
    """Commits that may be the culprit: those reachable from the bad revision and not from the good one.

    Holds who is an ancestor of whom as n x n bits: 125 kB for 1,000 commits, 50 MB for 20,000.
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
        """Which commits are an ancestor of commit i, or i itself; bool [n]."""
        return np.unpackbits(self._bits[i], count=len(self)).astype(bool)

    def descendants(self, i: int) -> Booleans:
        """Of which commits commit i is an ancestor, or itself; bool [n]."""
        return (self._bits[:, i >> 3] & (128 >> (i & 7))).astype(bool)

    def mass(self, weights: Floats) -> Floats:
        """Sum of the weights of each commit's ancestors, itself included; float64 [n]."""
        some = np.flatnonzero(weights)
        found = np.empty(len(self))
        for start in range(0, len(self), 512):  # unpacked, the whole would take eight times its memory
            rows = np.unpackbits(self._bits[start : start + 512], axis=1, count=len(self))
            found[start : start + 512] = rows[:, some] @ weights[some]
        return found

    def upto(self, i: int) -> History:
        """The history of commit i alone: its ancestors and itself."""
        kept = np.flatnonzero(self.ancestors(i)).tolist()
        place = {old: new for new, old in enumerate(kept)}
        return History([self.commits[k] for k in kept], [[place[p] for p in self.parents[k]] for k in kept])

    def alike(self, i: int, tested: Booleans) -> Booleans:
        """Which commits no verdict on the commits in `tested` (bool [n]) can tell from commit i; bool [n]."""
        same = np.ones(len(self), dtype=bool)
        own = self.descendants(i)
        rows = np.flatnonzero(tested)
        for start in range(0, len(rows), 512):
            block = rows[start : start + 512]
            unpacked = np.unpackbits(self._bits[block], axis=1, count=len(self)).astype(bool)
            same &= (unpacked == own[block][:, None]).all(axis=0)
        return same


@dataclass(frozen=True)
class NextProbe:
    """Test this commit: to search, to make sure once one candidate is left, or to check what was only inferred."""

    commit: str
    purpose: Literal["search", "confirm", "verify"]


@dataclass(frozen=True)
class Found:
    """The culprit, and the probability that it is."""

    commit: str
    confidence: float


@dataclass(frozen=True)
class Hidden:
    """The culprit is one of these, oldest first, which skipped commits keep from being told apart; with this probability."""

    commits: tuple[str, ...]
    confidence: float


@dataclass(frozen=True)
class Lost:
    """Too many verdicts without an answer: they are too flaky. The likeliest candidates, and the first one's probability."""

    commits: tuple[str, ...]
    confidence: float


Step = NextProbe | Found | Hidden | Lost


@dataclass(frozen=True)
class Belief:
    """What the verdicts say.

    Attributes:
        weights: probability of each candidate, float64 [n].
        consistent: candidates that need no verdict to be wrong, bool [n].
        good_flips: expected probability that a good commit is judged bad.
        bad_flips: expected probability that a bad commit is judged good.
    """

    weights: Floats
    consistent: Booleans
    good_flips: float
    bad_flips: float


def believe(history: History, tallies: Mapping[str, Tally], good: Tally) -> Belief:
    """Probability of each candidate given all verdicts.

    Args:
        history: the candidates, all as likely before any verdict.
        tallies: verdicts by commit; those on commits outside of `history` are left out.
        good: verdicts on the good revision, which is before every candidate.
    """
    right_bad, wrong_good = np.zeros(len(history)), np.zeros(len(history))
    total = Tally()
    for commit, tally in tallies.items():
        if commit in history.index:
            # If the candidate is an ancestor, this commit is bad.
            above = history.ancestors(history.index[commit])
            right_bad[above] += tally.bad
            wrong_good[above] += tally.good
            total = Tally(total.good + tally.good, total.bad + tally.bad)
    wrong_bad, right_good = total.bad - right_bad + good.bad, total.good - wrong_good + good.good
    logs = betaln(PRIOR + wrong_good, PRIOR + right_bad) + betaln(PRIOR + wrong_bad, PRIOR + right_good)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()

    def expected(wrong: Floats, right: Floats) -> float:
        return float(weights @ ((PRIOR + wrong) / (2 * PRIOR + wrong + right)))

    return Belief(
        weights, (wrong_good == 0) & (wrong_bad == 0), expected(wrong_bad, right_good), expected(wrong_good, right_bad)
    )


def proof(
    tally: Tally, expected: Literal["good", "bad"], repeats: int
) -> Literal["more", "proven", "refuted", "flaky"]:
    """Whether verdicts on an end of the range prove that it is what was said of it.

    Args:
        tally: the verdicts so far.
        expected: what it was said to be.
        repeats: verdicts that are needed where all agree.
    """
    right, wrong = (tally.good, tally.bad) if expected == "good" else (tally.bad, tally.good)
    if right + wrong < repeats:
        return "more"
    if not tally.flipped:
        return "proven" if right else "refuted"
    below_half = float(betainc(PRIOR + wrong, PRIOR + right, 0.5))
    if below_half >= PROVEN:
        return "proven"
    if below_half <= 1 - PROVEN:
        return "refuted"
    return "flaky" if right + wrong >= MOST_REPEATS else "more"


def next_step(
    history: History, tallies: Mapping[str, Tally], skipped: Collection[str], good: Tally, confidence: float
) -> Step:
    """What to do next.

    Args:
        history: the range.
        tallies: verdicts by commit, the bad revision's among them.
        skipped: commits that cannot be tested (any more: verdicts that they have still count).
        good: verdicts on the good revision.
        confidence: probability at which a commit is named.
    """
    flipped = good.flipped or any(tally.flipped for tally in tallies.values())
    while True:
        known = {commit: tally for commit, tally in tallies.items() if commit in history.index}
        belief = believe(history, known, good)
        if not belief.consistent.any() and not flipped:
            # Verdicts that agree with themselves but not with one culprit: the history is not monotone. The commit with the
            # shortest history of those that are bad has a culprit of its own.
            first = min(
                (c for c, t in known.items() if t.is_bad), key=lambda c: history.ancestors(history.index[c]).sum()
            )
            if known[first].bad < FIRM:
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
    history: History, known: Mapping[str, Tally], skipped: Collection[str], belief: Belief, confidence: float
) -> Step:
    testable = np.array([commit not in skipped for commit in history.commits])
    judged = np.array([commit in known for commit in history.commits])
    best = int(belief.weights.argmax())
    alike = history.alike(best, testable | judged)
    sure = float(belief.weights[alike].sum())
    if sure >= confidence:
        if alike.sum() == 1:
            return Found(history.commits[best], sure)
        return Hidden(tuple(history.commits[i] for i in np.flatnonzero(alike)), sure)
    likely = np.argsort(-belief.weights)[:10]
    lost = Lost(tuple(history.commits[i] for i in likely), sure)
    if sum(t.good + t.bad for t in known.values()) > 50 + 40 * math.log2(len(history) + 1):
        return lost
    builds = np.where(testable, buildable(history, known, skipped), 0.0)
    if belief.consistent.sum() > 1:
        share = history.mass(belief.consistent / belief.consistent.sum())
        gain = _entropy(np.clip(share, 0, 1)) * builds
        if gain.max() > 1e-9:
            return NextProbe(history.commits[int(gain.argmax())], "search")
    gain = information(np.clip(history.mass(belief.weights), 0, 1), belief.good_flips, belief.bad_flips) * builds
    if gain.max() <= 1e-9:
        return lost
    chosen = history.commits[int(gain.argmax())]
    return NextProbe(chosen, "confirm" if chosen in known or belief.consistent.any() else "search")


def buildable(history: History, known: Mapping[str, Tally], skipped: Collection[str]) -> Floats:
    """How likely each commit is to build, beside a commit far from any that does not; float64 [n].

    Breaks last for some commits: at distance d of k broken ones with none that builds among them, d / (d + 2^(k - 1)), so that
    the step away doubles with each further one. Distances are in topological order.
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


def information(share: Any, good_flips: float, bad_flips: float) -> Floats:
    """Bits that a verdict tells about whether a commit is bad, which it is with probability `share`."""
    judged_bad = share * (1 - bad_flips) + (1 - share) * good_flips
    noise = share * _entropy(np.array(bad_flips)) + (1 - share) * _entropy(np.array(good_flips))
    return np.asarray(np.maximum(_entropy(judged_bad) - noise, 0.0), dtype=np.float64)


def _entropy(p: Floats) -> Floats:
    return np.asarray(-(xlogy(p, p) + xlogy(1 - p, 1 - p)) / math.log(2), dtype=np.float64)
