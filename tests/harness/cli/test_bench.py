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
from assay.harness.judge.report import Report
from assay.harness.run import run
from assay.harness.run.bench import plan_bench
from assay.harness.run.plan import prepare

COMMAND = ("bench",)
"""What `call` begins with."""


def test_the_command_that_a_bench_cites_repeats_it(monkeypatch: pytest.MonkeyPatch, call: Callable[..., int]) -> None:
    flags: dict[str, Any] = {
        "device": "cpu", "engine": "sglang", "reference_engine": "sglang", "candidate_engine": "sglang",
        "reference": "torch_native", "candidate": "torch_native", "model": "tiny",
        "engine_arg": ("--page-size=16", "--chunked-prefill-size=64"), "latency_shapes": "short,64:8:16",
        "latency_concurrency": "2,8", "latency_seconds": 5.0, "latency_bound": 1.5, "servers": "together", "startup_timeout": 60.0,
        "reference_model": "tiny", "candidate_model": "tiny", "reference_env": ("A=b",), "candidate_env": ("A=c", "B=d"),
        "reference_arg": ("--max-prefill-tokens=4096",), "candidate_arg": ("--max-prefill-tokens=2048",),
        "reference_python": sys.executable, "candidate_python": "python3",
        "reference_with": ("a==1", "b @ git+https://c/d"), "candidate_with": ("a==2",),
    }  # fmt: skip
    assert set(flags) == set(BENCH_FLAGS)
    plan = plan_bench(prepare(make_spec(flags).changed(suites=("latency",))))
    asked: list[RunSpec] = []

    def asks(spec: RunSpec, out: Path | None, **how: Any) -> Report:
        asked.append(spec)
        raise typer.Exit

    monkeypatch.setattr(run, "run", asks)
    assert call(*shlex.split(plan.command)[2:]) == 0
    assert asked == [plan.run.spec]
