from __future__ import annotations

from itertools import combinations, pairwise

from assay.harness.engines.sglang.features import Feature, features_of
from assay.harness.judge.invariance_arms import BASE, ArmJudge, base_of, clashes, closed, pairs, possible, server_of
from assay.harness.judge.probe_scores import Bound

CPU = features_of("cpu")
KNOWN = {id_: feature for id_, feature in CPU.items() if not feature.unavailable("cpu", 0, {"architectures": ["LlamaForCausalLM"]})}


def own(id_: str, **settings: object) -> Feature:
    return Feature(id_, id_, **settings)  # type: ignore[arg-type]


def test_every_two_features_that_can_be_on_together_are() -> None:
    arms = pairs(KNOWN)
    for one, other in combinations(KNOWN, 2):
        together = closed({one, other}, KNOWN)
        assert any(together <= arm for arm in arms) != clashes(together, KNOWN), f"{one} and {other}"


def test_every_feature_is_off_in_an_arm_in_which_another_is_on_unless_it_is_needed() -> None:
    arms = pairs(KNOWN)
    for one in KNOWN:
        for other in KNOWN.keys() - closed([one], KNOWN):
            assert any(one in arm and other not in arm for arm in arms), f"{one} without {other}"


def test_arms_can_be_switched_on_and_need_few_servers() -> None:
    arms = pairs(KNOWN)
    assert all(possible(arm, KNOWN) for arm in arms)
    assert len(arms) <= 20
    assert len({server_of(arm, KNOWN) for arm in arms}) <= 12
    assert len(set(arms)) == len(arms)


def test_arms_of_one_server_follow_each_other_and_what_stays_comes_last() -> None:
    arms = pairs(KNOWN)
    servers = [server_of(arm, KNOWN) for arm in arms]
    assert sum(one != other for one, other in pairwise(servers)) == len(set(servers)) - 1
    for one, other in pairwise(arms):
        same_server = server_of(one, KNOWN) == server_of(other, KNOWN)
        assert not (same_server and "weights-again" in one and "weights-again" not in other)


def test_what_has_a_base_of_its_own_is_compared_with_it() -> None:
    known = {"exact": own("exact", on=("--exact",), cost="a base of its own"), "batch": own("batch")}
    assert base_of(frozenset({"exact", "batch"}), known) == {"exact"}
    assert base_of(frozenset({"exact"}), known) == BASE
    assert base_of(frozenset({"batch"}), known) == BASE


def test_some_arm_may_not_differ_by_one_bit_from_a_base_of_its_own() -> None:
    known = {id_: feature for id_, feature in features_of("cuda").items() if feature.gpus == 1}
    exact = {"deterministic", "batch", "order", "streamed"}
    arms = pairs(known)
    assert exact in arms
    judge = ArmJudge({}, {"prefill": Bound(1.0, 1.0), "decode": Bound(1.0, 1.0)}, known, "bfloat16")
    assert set(judge.limits_of(frozenset(exact)).values()) == {Bound(0.0, 0.0)}
    assert server_of(frozenset(exact), known) == base_of(frozenset(exact), known), "it needs no server beside its base's"
    assert {"deterministic"} in pairs({"deterministic": known["deterministic"]})
