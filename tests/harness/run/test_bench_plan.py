from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from assay.evals.loads import prompts
from assay.harness.config import make_spec
from assay.harness.errors import UsageError
from assay.harness.run.bench_plan import BenchPlan, plan_bench, timed_spec, turns
from assay.harness.run.plan import prepare


def planned(policy: dict[str, Any] | None = None, seed: int = 0, **flags: Any) -> BenchPlan:
    asked = {f"latency_{name}": value for name, value in (policy or {}).items()}
    spec = timed_spec(make_spec({"candidate": "torch_native", "servers": "together"} | asked | flags))
    return plan_bench(prepare(spec), seed)


def test_every_round_plays_every_load_twice_per_role_side_by_side() -> None:
    plan = planned({"shapes": ("short", "shared"), "concurrency": (1, 8)})
    for number, groups in enumerate(zip(*[islice(turns(plan), 12)] * 4, strict=True)):
        assert {(group[0].shape.name, group[0].concurrency) for group in groups} == {
            (s, c) for s in ("short", "shared") for c in (1, 8)
        }
        for group in groups:
            assert {turn.round for turn in group} == {number}
            assert len({(turn.shape.name, turn.concurrency) for turn in group}) == 1
            assert Counter(turn.role for turn in group) == {"reference": 2, "candidate": 2}
            assert len({(turn.role, turn.again) for turn in group}) == 4


def test_the_order_is_random_and_the_same_for_the_same_seed() -> None:
    orders = [[(t.role, t.again) for t in group] for group in islice(turns(planned()), 60)]
    assert orders == [[(t.role, t.again) for t in group] for group in islice(turns(planned()), 60)]
    assert orders != [[(t.role, t.again) for t in group] for group in islice(turns(planned(seed=1)), 60)]
    first = Counter(order[0][0] for order in orders)
    assert min(first["reference"], first["candidate"]) >= 15, "neither role always goes first"
    pair = Counter(order.index(("candidate", False)) < order.index(("reference", False)) for order in orders)
    assert min(pair.values()) >= 15, "nor within a pair"


def test_roles_share_prompts_within_a_round_and_rounds_share_none() -> None:
    plan = planned({"shapes": ("long",), "concurrency": (2,)})
    asked = [[prompts(t.shape, t.requests, plan.vocabulary, t.seed) for t in group] for group in islice(turns(plan), 3)]
    assert all(one == group[0] for group in asked for one in group)
    assert asked[0][0] != asked[1][0] != asked[2][0]


def test_a_chunked_load_sets_the_chunk_length_unless_the_user_does() -> None:
    assert planned().arguments == ("--chunked-prefill-size=128",)
    assert planned({"shapes": ("short",)}).arguments == ()
    mine = planned(engine_arg=("--chunked-prefill-size=64",))
    assert mine.run.spec.candidate.flags == ("--chunked-prefill-size=64",), "which comes last, and wins"


def test_graphs_are_captured_where_no_kernel_of_the_contract_computes_decode() -> None:
    assert not planned().eager
    assert not planned(candidate="sage_attn").eager, "its decode is delegated"
    assert planned(candidate="assay.harness.attention.sdpa:torch_sdpa").eager


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"bound": 0.9}, "--latency-bound"),
        ({"seconds": 0}, "--latency-seconds"),
        ({"concurrency": (0,)}, "--latency-concurrency"),
        ({"shapes": ("shot",)}, "shot is not a shape"),
        ({"shapes": ("5000:8",)}, r"5000 \+ 8"),
    ],
)
def test_wrong_use(policy: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        planned(policy)


def test_servers_that_cannot_run_at_once_are_wrong_use() -> None:
    with pytest.raises(UsageError, match="at the same time"):
        planned(servers="in-turn")


def test_a_throughput_test_with_engine_flags_can_be_specified() -> None:
    flags = ("--enable-torch-compile", "--cuda-graph-max-bs", "4")
    policy = {"shapes": ("256:256",), "concurrency": (1,)}
    plan = planned(policy, engine_arg=flags)
    assert plan.run.spec.reference.flags == plan.run.spec.candidate.flags == flags
    assert [(shape.prompt, shape.output) for shape in plan.shapes] == [(256, 256)]
