"""A bench: the order of its blocks, and when it ends. Times of blocks are simulated; real ones are in test_bench_server.py."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from assay.evals.loads import prompts
from assay.harness.config import make_spec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, Timing
from assay.harness.progress import ProgressDisplay
from assay.harness.run import bench as module
from assay.harness.run.bench import BenchPlan, Turn, plan_bench, turns
from assay.harness.run.plan import prepare
from assay.harness.sides import ROLES
from assay.harness.stats.ratio import MIN_RATIOS


def planned(policy: dict[str, Any] | None = None, seed: int = 0, **flags: Any) -> BenchPlan:
    asked = {f"latency_{name}": value for name, value in (policy or {}).items()}
    spec = make_spec({"candidate": "torch_native", "servers": "together"} | asked | flags)
    return plan_bench(prepare(spec), seed)


def played(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float],
    chunks_of: Callable[[int], int] = lambda number: 3,
) -> int:  # fmt: skip
    """Number of rounds that are played if a block takes `seconds_of` its round and the first block uses up the budget.

    The block that is played as the nth comes in `chunks_of` n chunks.
    """
    count = itertools.count()

    def block(turn: Turn, engine: Any, client: Any, vocabulary: int, number: int) -> list[Timing]:
        chunks = chunks_of(next(count))
        times = tuple(seconds_of(turn.round) * (1 + at) / chunks for at in range(chunks))
        return [
            Timing(
                role=turn.role, again=turn.again, round=turn.round, block=number, shape=turn.shape.name,
                concurrency=turn.concurrency, index=0, sent_s=0.0, latency_s=times[-1], chunk_s=times,
                chunk_tokens=tuple(range(1, chunks + 1)), prompt_tokens=9, completion_tokens=chunks,
            )
        ]  # fmt: skip

    monkeypatch.setattr(module, "_play", block)
    monkeypatch.setattr(module, "_PAUSES_S", (0.0, 0.0))
    plan = planned({"shapes": "short,long", "concurrency": "1", "seconds": 1e-9})
    bench, engine = BenchFolder.new(folder), SimpleNamespace(client=lambda: None)
    with ProgressDisplay(Console(file=StringIO())) as display:
        module._play_blocks(plan, cast(Any, dict.fromkeys(ROLES, engine)), bench, display)
    rounds = [timing.round for timing in bench.lines(TIMINGS, Timing)]
    assert all(rounds.count(number) == 8 for number in set(rounds)), "two loads of four blocks each"
    return max(rounds) + 1


@pytest.mark.parametrize(
    ("seconds_of", "least", "most"),
    [
        (lambda number: 0.1, 1 + MIN_RATIOS, 1 + MIN_RATIOS),
        (lambda number: 0.5 if number < 4 else 0.1, 4 + MIN_RATIOS, 4 + MIN_RATIOS),  # rounds of warm-up are replaced
        (lambda number: 0.1 / 1.5**number, 1, 2 * MIN_RATIOS),  # a machine that never settles: at most half are warm-up
    ],
)
def test_as_many_rounds_are_played_as_a_verdict_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float], least: int, most: int
) -> None:
    assert least <= played(tmp_path / "bench", monkeypatch, seconds_of) <= most


def test_answers_in_one_chunk_end_a_bench_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="in one chunk"):
        played(tmp_path / "bench", monkeypatch, lambda number: 0.1, lambda number: 1)


def test_a_bench_that_was_played_to_its_end_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BenchFolder.new(tmp_path / "bench")
    sides: list[Any] = []

    def measured(*args: Any) -> None:
        (bench.path / "timings.jsonl").write_text("")
        assert not bench.complete

    def made(*args: Any, side: Any, **more: Any) -> Any:
        sides.append(side)
        return SimpleNamespace(role="reference", backend="b", label="l")

    monkeypatch.setattr(module, "make_engine", made)
    monkeypatch.setattr(module, "_measure_servers", measured)
    monkeypatch.setattr(module, "running", lambda *args: nullcontext())
    with ProgressDisplay(Console(file=StringIO())) as display:
        module.bench(planned(engine_arg=("--chunked-prefill-size=64",)), bench, display)
    assert bench.complete
    assert sides[0].flags == ("--chunked-prefill-size=128", "--chunked-prefill-size=64"), "the user's comes last, and wins"
    (bench.path / "timings.jsonl").unlink()
    with pytest.raises(EvidenceError, match=r"timings\.jsonl was removed"):
        bench.check_sealed()


def test_every_round_plays_every_load_twice_per_role_side_by_side() -> None:
    plan = planned({"shapes": ("short", "shared"), "concurrency": (1, 8)})
    for number, groups in enumerate(zip(*[islice(turns(plan), 12)] * 4, strict=True)):
        assert {(group[0].shape.name, group[0].concurrency) for group in groups} == {
            (s, c) for s in ("short", "shared") for c in (1, 8)
        }
        for group in groups:
            assert {turn.round for turn in group} == {number}
            assert len({(turn.shape.name, turn.concurrency) for turn in group}) == 1
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


@pytest.mark.parametrize(
    ("candidate", "eager"),
    [("torch_native", False), ("sage_attn", False), ("assay.harness.attention.sdpa:torch_sdpa", True)],
    ids=["engine", "decode is delegated", "decode"],
)
def test_graphs_are_captured_where_no_kernel_of_the_contract_computes_decode(candidate: str, eager: bool) -> None:
    assert planned(candidate=candidate).run.has_decode_kernel == eager


@pytest.mark.parametrize("late", [{3}, {3, 4, 9}])
def test_a_block_that_was_read_late_is_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: set[int]) -> None:
    rounds = played(tmp_path / "bench", monkeypatch, lambda number: 0.1, lambda number: 1 if number in late else 3)
    assert rounds == 1 + MIN_RATIOS


def test_a_block_that_is_read_late_each_time_ends_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="in one chunk"):
        played(tmp_path / "bench", monkeypatch, lambda number: 0.1, lambda number: 1 if number in (7, 8, 9) else 3)
