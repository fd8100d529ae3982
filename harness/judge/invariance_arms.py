"""The arms: which features are on together, in an order that starts few servers, and how each is judged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from assay.harness.attention.covering import AxisPart, Row, covering
from assay.harness.engines.features import Feature
from assay.harness.evidence.probes import ProbePass
from assay.harness.judge.noise_limits import EXACT_SWING
from assay.harness.judge.probe_outcome import PassOutcome, outcome
from assay.harness.judge.probe_scores import Bound, Measure, kernel_cost
from assay.harness.sides import flag_values
from assay.harness.statement import state

Arm = frozenset[str]
"""The ids of the features that are on."""
BASE: Arm = frozenset()
# Covering arrays to choose from.
_ARRAYS = 16
# Change of log-odds, in nats, below which another greedy text is a tie, by dtype; in others `EXACT_SWING`.
_SWING: Mapping[str, float] = {"float32": 1e-3}


def name_of(arm: Iterable[str]) -> str:
    """Name an arm, such as "page-size + prefix-cache"."""
    return " + ".join(sorted(arm)) or "no feature"


def closed(features: Iterable[str], known: Mapping[str, Feature]) -> Arm:
    """Add to features the ones that they require to have an effect."""
    arm = set(features)
    while missing := {need for id_ in arm for need in known[id_].requires} - arm:
        arm |= missing
    return frozenset(arm)


def clashes(arm: Iterable[str], known: Mapping[str, Feature]) -> bool:
    """Return True if two of the features cannot be on together."""
    chosen = set(arm)
    return any(other in chosen for id_ in chosen for other in known[id_].excludes)


def possible(arm: Arm, known: Mapping[str, Feature]) -> bool:
    """Return True if the features can be on together, and each has an effect."""
    return arm == closed(arm, known) and not clashes(arm, known)


def server_of(arm: Arm, known: Mapping[str, Feature]) -> Arm:
    """Return the features of an arm that decide how its server is started."""
    return frozenset(id_ for id_ in arm if known[id_].restarts)


def base_of(arm: Arm, known: Mapping[str, Feature]) -> Arm:
    """Return the arm that an arm is compared with: no features, or its features that have a separate base."""
    own = [id_ for id_ in arm if known[id_].cost == "a base of its own"]
    base = closed(own, known)
    return BASE if base == arm else base


def speculation_of(arm: Arm, known: Mapping[str, Feature]) -> Arm:
    """Return the features of an arm that speculate with a model, and their requirements: the base without any."""
    return closed([id_ for id_ in arm if known[id_].drafts], known)


def pairs(known: Mapping[str, Feature]) -> list[Arm]:
    """Return arms in which, for every two features that can be on together, both are on, and each is on without the other.

    Of several covering arrays, the one with the fewest servers is taken. A feature with a separate base is also on with nothing but
    the features that may not change one bit of it.
    """
    axes = dict.fromkeys(known, (False, True))
    groups = [tuple(map(AxisPart, pair)) for pair in combinations(known, 2)] or [(AxisPart(id_),) for id_ in known]
    further = _to_the_bit(known)

    def arms_of(seed: int) -> Collection[Arm]:
        rows = covering(axes, groups, seed, allowed=lambda row: _allowed(row, known))
        return {arm for arm in (*map(_arm, rows), *further) if arm and possible(arm, known)}

    def cost(arms: Collection[Arm]) -> tuple[int, int]:
        return len({server_of(arm, known) for arm in arms}), len(arms)

    return in_order(min(map(arms_of, range(_ARRAYS)), key=cost), known) if known else []


def _to_the_bit(known: Mapping[str, Feature]) -> list[Arm]:
    """Return, for each feature with a separate base, the arm of it and all features that may not change one bit of its output."""
    bitwise = [id_ for id_, feature in known.items() if feature.bitwise]
    own = [id_ for id_, feature in known.items() if feature.cost == "a base of its own"]
    return [closed([id_, *bitwise], known) for id_ in own] if bitwise else []


def _allowed(row: Row, known: Mapping[str, Feature]) -> bool:
    """Return True if a partly decided row can become an arm."""
    arm = _arm(row)
    needs = {need for id_ in arm for need in known[id_].requires}
    return not clashes(closed(arm, known), known) and all(row.get(need, True) for need in needs)


def _arm(row: Row) -> Arm:
    return frozenset(id_ for id_, on in row.items() if on is True)


def in_order(arms: Collection[Arm], known: Mapping[str, Feature]) -> list[Arm]:
    """Sort arms so that those of one server follow each other, and features that stay on in a server come last."""

    def key(arm: Arm) -> tuple[int, list[str], int, int, list[str]]:
        server = server_of(arm, known)
        stays = sum(known[id_].stays for id_ in arm)
        return len(server), sorted(server), stays, len(arm), sorted(arm)

    return sorted(arms, key=key)


def smallest(failing: Collection[Arm]) -> list[Arm]:
    """Return the variants that differ while none of their parts does, smallest first."""
    return sorted(
        (arm for arm in failing if not any(other < arm for other in failing)), key=lambda arm: (len(arm), sorted(arm))
    )


@dataclass(frozen=True)
class ArmJudge:
    """Judges the arms of an invocation.

    Attributes:
        records: the first record of each arm, and of the base.
        limits: bounds of the distances, without the cost of a feature.
    """

    records: Mapping[Arm, ProbePass]
    limits: Mapping[Measure, Bound]
    known: Mapping[str, Feature]
    dtype: str
    flags: tuple[str, ...] = ()

    def base_of(self, arm: Arm) -> ProbePass | None:
        """Return the record that a variant is compared with, or None if it did not finish."""
        base = self.records.get(base_of(arm, self.known))
        return base if base is not None and base.complete else None

    def limits_of(self, arm: Arm) -> dict[Measure, Bound]:
        """Return the bounds, widened by the declared cost of an arm's features.

        Another kernel rounds like an honest one. Deterministic kernels do not depend on the batch, so nothing may differ from their
        separate base if the other features are deterministic too.
        """
        features = [self.known[id_] for id_ in arm]
        own = [feature for feature in features if feature.cost == "a base of its own"]
        exact = bool(own) and all(feature.bitwise or feature in own for feature in features)
        if exact and len(own) < len(features):
            return dict.fromkeys(self.limits, Bound(0.0, 0.0))
        if exact or any(feature.cost == "another kernel" for feature in features):
            return {measure: bound.widened(kernel_cost(self.dtype)) for measure, bound in self.limits.items()}
        return dict(self.limits)

    def drafted_by(self, arm: Arm) -> ProbePass | None:
        """Return the arm whose drafts an arm's are compared with: its speculation alone, or a base that speculates; or None.

        Drafts of n-grams depend on earlier requests, and are not compared.
        """
        alone = speculation_of(arm, self.known)
        if alone == BASE and flag_values(self.flags).get("--speculative-algorithm", "NGRAM").upper() == "NGRAM":
            return None
        return self.records.get(alone) if alone != arm else None

    def outcome(self, record: ProbePass) -> PassOutcome:
        """Judge an arm's record."""
        arm = frozenset(record.features)
        if (base := self.base_of(arm)) is None:
            why = state("shows-nothing", why="base", base=name_of(base_of(arm, self.known)))
            return PassOutcome(arm, "not run", {}, why=(why,))
        kernel = any(self.known[id_].cost == "another kernel" for id_ in arm)
        swing = EXACT_SWING if kernel else _SWING.get(self.dtype, EXACT_SWING)
        drafts = max((self.known[id_].drafts for id_ in arm), default=0.0)
        return outcome(base, record, self.limits_of(arm), swing, drafts, self.drafted_by(arm))
