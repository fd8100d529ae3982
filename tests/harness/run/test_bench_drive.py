"""When a bench ends. Times of blocks are simulated here; real blocks are played in test_bench_server.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from assay.harness.config import make_spec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, Timing
from assay.harness.progress import ProgressDisplay
from assay.harness.run import bench_drive as drive
from assay.harness.run.bench_plan import Turn, plan_bench, timed_spec
from assay.harness.run.plan import prepare
from assay.harness.sides import ROLES
from assay.harness.stats.ratio import MIN_RATIOS


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float], chunks: int = 3) -> int:
    """Number of rounds that are played if a block takes `seconds_of` its round and the first block uses up the budget."""

    def block(turn: Turn, engine: Any, client: Any, vocabulary: int, number: int) -> list[Timing]:
        times = tuple(seconds_of(turn.round) * (1 + at) / chunks for at in range(chunks))
        return [
            Timing(
                role=turn.role, again=turn.again, round=turn.round, block=number, shape=turn.shape.name,
                concurrency=turn.concurrency, index=0, sent_s=0.0, latency_s=times[-1], chunk_s=times,
                chunk_tokens=tuple(range(1, chunks + 1)), prompt_tokens=9, completion_tokens=chunks,
            )
        ]  # fmt: skip

    monkeypatch.setattr(drive, "_play", block)
    flags = {"latency_shapes": "short,long", "latency_concurrency": "1", "latency_seconds": 1e-9, "servers": "together"}
    spec = timed_spec(make_spec(flags | {"candidate": "torch_native"}))
    bench = BenchFolder.new(folder)
    engine = SimpleNamespace(client=lambda: None)
    with ProgressDisplay(Console(file=StringIO())) as display:
        drive.play(plan_bench(prepare(spec)), cast(Any, dict.fromkeys(ROLES, engine)), bench, display)
    played = [timing.round for timing in bench.lines(TIMINGS, Timing)]
    assert all(played.count(number) == 8 for number in set(played)), "two loads of four blocks each"
    return max(played) + 1


def test_a_bench_that_was_played_to_its_end_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BenchFolder.new(tmp_path / "bench")

    def played(*args: Any) -> None:
        (bench.path / "timings.jsonl").write_text("")
        assert not bench.complete

    monkeypatch.setattr(drive, "make_engines", lambda *args: {})
    monkeypatch.setattr(drive, "measure_servers", played)
    monkeypatch.setattr(drive, "running", lambda *args: nullcontext())
    plan = plan_bench(prepare(timed_spec(make_spec({"candidate": "torch_native", "servers": "together"}))))
    with ProgressDisplay(Console(file=StringIO())) as display:
        drive.bench(plan, bench, display)
    assert bench.complete
    (bench.path / "timings.jsonl").unlink()
    with pytest.raises(EvidenceError, match=r"timings\.jsonl was removed"):
        bench.check_sealed()


def test_as_many_rounds_are_played_as_a_verdict_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(tmp_path / "steady", monkeypatch, lambda number: 0.1) == 1 + MIN_RATIOS


def test_rounds_of_warm_up_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(tmp_path / "slow to warm", monkeypatch, lambda number: 0.5 if number < 4 else 0.1) == 4 + MIN_RATIOS


def test_a_bench_ends_even_if_the_machine_never_settles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # At most half of the rounds are warm-up.
    assert play(tmp_path / "slower and slower", monkeypatch, lambda number: 0.1 / 1.5**number) <= 2 * MIN_RATIOS


def test_answers_in_one_chunk_end_a_bench_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="in one chunk"):
        play(tmp_path / "whole", monkeypatch, lambda number: 0.1, chunks=1)
