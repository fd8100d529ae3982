"""The command line of ``assay bench``. Bad input ends with a sentence and exit code 2; nothing is started."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from assay.harness.config import BENCH_FLAGS, RunSpec, make_spec
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.run import run
from assay.harness.run.bench import plan_bench, timed_spec
from assay.harness.run.plan import prepare

COMMAND = ("bench",)
"""What `call` begins with."""


def test_the_command_that_a_bench_cites_repeats_it(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int], tmp_path: Path
) -> None:
    data = tmp_path / "questions.csv"
    data.write_text("Question,A,B,C,D,Answer,Subject\nWhy?,1,2,3,4,A,logic\n")
    flags: dict[str, Any] = {
        "device": "cpu", "engine": "sglang", "reference_engine": "sglang", "candidate_engine": "sglang",
        "reference": "torch_native", "candidate": "torch_native", "model": "tiny",
        "engine_arg": ("--page-size=16", "--chunked-prefill-size=64"), "latency_shapes": "short,64:8:16",
        "latency_concurrency": "2,8", "latency_seconds": 5.0, "latency_bound": 1.5, "data": str(data),
        "servers": "together", "startup_timeout": 60.0,
        "reference_model": "tiny", "candidate_model": "tiny", "reference_env": ("A=b",), "candidate_env": ("A=c", "B=d"),
        "reference_arg": ("--max-prefill-tokens=4096",), "candidate_arg": ("--max-prefill-tokens=2048",),
        "reference_python": sys.executable, "candidate_python": "python3",
        "reference_with": ("a==1", "b @ git+https://c/d"), "candidate_with": ("a==2",),
    }  # fmt: skip
    assert set(flags) == set(BENCH_FLAGS)
    plan = plan_bench(prepare(timed_spec(make_spec(flags))))
    asked: list[tuple[RunSpec, dict[str, Any]]] = []

    def bench_servers(spec: RunSpec, out: Path, **how: Any) -> LatencyResult:
        asked.append((timed_spec(spec), how))
        raise typer.Exit

    monkeypatch.setattr(run, "bench_servers", bench_servers)
    assert call(*shlex.split(plan.command)[2:]) == 0
    ((spec, _),) = asked
    assert spec == plan.run.spec
