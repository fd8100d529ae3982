"""The arms: which features are on together, in an order that starts few servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from assay.harness.attention.covering import AxisPart, Row, covering
from assay.harness.engines.sglang.features import Feature

Arm = frozenset[str]
"""The ids of the features that are on."""
BASE: Arm = frozenset()
_SERVER = "server"


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


def singles(known: Mapping[str, Feature]) -> list[Arm]:
    """Return an arm for each feature: the feature alone, with its requirements."""
    return in_order({closed([id_], known) for id_ in known}, known)


def pairs(known: Mapping[str, Feature], seed: int = 0) -> list[Arm]:
    """Return arms in which, for every two features that can be on together, both are on, each is on alone, and both are off.

    The servers are a covering array of the features that a server is started with; each server's arms are a covering array of the
    other features. A server is used for as many arms as its pairs need. A feature with a separate base is also on with nothing but
    features that may not change one bit of it.
    """
    of_server = {id_: feature for id_, feature in known.items() if feature.restarts}
    of_request = {id_: feature for id_, feature in known.items() if not feature.restarts}
    # Requirements of a server's feature on requests are decided with the requests.
    servers = _covered(of_server, dict.fromkeys(of_server, (False, True)), [], seed, known)
    starts = sorted({_arm(row) for row in servers} | {BASE}, key=lambda arm: (len(arm), sorted(arm)))
    axes = {_SERVER: tuple(range(len(starts)))} | dict.fromkeys(of_request, (False, True))
    mixed = [
        (AxisPart(_SERVER, of=lambda n, id_=id_: id_ in starts[n]), AxisPart(other))  # type: ignore[misc]
        for id_ in of_server
        for other in of_request
    ]
    rows = covering(
        axes,
        [*mixed, *(tuple(map(AxisPart, pair)) for pair in combinations(of_request, 2)), (AxisPart(_SERVER),)],
        seed,
        allowed=lambda row: _allowed(_joined(row, starts), known),
    )
    arms = {_arm(_joined(row, starts)) for row in rows}
    further = (*_rest(arms, known), *_to_the_bit(known))
    return in_order({arm for arm in (*arms, *further) if arm and possible(arm, known)}, known)


def _to_the_bit(known: Mapping[str, Feature]) -> list[Arm]:
    """Return, for each feature with a separate base, the arm of it and all features that may not change one bit of its output."""
    bitwise = [id_ for id_, feature in known.items() if feature.bitwise]
    own = [id_ for id_, feature in known.items() if feature.cost == "a base of its own"]
    return [closed([id_, *bitwise], known) for id_ in own] if bitwise else []


def _rest(arms: Collection[Arm], known: Mapping[str, Feature]) -> list[Arm]:
    """Join the pairs that no arm has into few further arms: servers were chosen before the requests to them were known."""
    both = [closed(pair, known) for pair in combinations(known, 2)]
    missing = [pair for pair in both if not clashes(pair, known) and not any(pair <= arm for arm in arms)]
    joined: list[Arm] = []
    for pair in missing:
        fitting = [arm for arm in joined if not clashes(arm | pair, known)]
        if not any(pair <= arm for arm in joined):
            joined = [arm for arm in joined if arm not in fitting[:1]] + [pair.union(*fitting[:1])]
    every = (*arms, *joined)
    alone = [
        closed([first], known)
        for first in known
        if any(all(other in arm for arm in every if first in arm) for other in known.keys() - closed([first], known))
    ]
    return [*joined, *alone]


def _covered(
    features: Mapping[str, Feature], axes: Mapping[str, Sequence[bool]], fixed: Collection[Row], seed: int,
    known: Mapping[str, Feature],
) -> list[Row]:  # fmt: skip
    groups = [tuple(map(AxisPart, pair)) for pair in combinations(features, 2)] or [
        (AxisPart(id_),) for id_ in features
    ]
    return covering(axes, groups, seed, fixed, allowed=lambda row: _allowed(row, known)) if groups else []


def _joined(row: Row, starts: Sequence[Arm]) -> Row:
    """Write out which features the server of a row has."""
    joined = {id_: value for id_, value in row.items() if id_ != _SERVER}
    if _SERVER in row:
        every = frozenset().union(*starts)
        joined |= {id_: id_ in starts[row[_SERVER]] for id_ in every}
    return joined


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


def left_out(planned: Collection[Arm], done: Collection[Arm], known: Mapping[str, Feature]) -> list[tuple[str, str]]:
    """Return the pairs of features that should have been on together in some arm, but were in none."""

    def covered(arms: Collection[Arm]) -> set[tuple[str, str]]:
        return {pair for arm in arms for pair in combinations(sorted(arm), 2)}

    return sorted(covered(planned) - covered(done))
