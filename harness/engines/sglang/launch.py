"""Launching an SGLang server: `Launch` -> its command line and environment."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

from assay.harness.engines.launch import HOST, Launch, common_settings, with_extra
from assay.harness.sides import flag_values, profile_of

STAND_INS = Path(__file__).parent / "stand_ins"
CHUNK_FLAG = "--chunked-prefill-size"
"""SGLang's flag for the most tokens that are prefilled at once."""
MODULE = "sglang.launch_server"
_CPU_FLAGS = ("--dtype", "float32", "--mem-fraction-static", "0.2", "--max-total-tokens", "32768", "--sleep-on-idle")
# Flags by which processes share a model, each with its other names. With data-parallel attention SGLang uses fewer.
_RANK_FLAGS = (
    ("--tp-size", "--tp", "--tensor-parallel-size"),
    ("--pp-size", "--pipeline-parallel-size"),
    ("--dp-size", "--dp", "--data-parallel-size"),
)
# These dumps keep a server up for 5 s (65 s with a GPU) after its scheduler has died, which would delay its detection as long.
# Set a variable to get its dump.
_CRASH_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


def command(launch: Launch, port: int, name: str) -> list[str]:
    """Return the server's command line; ``name`` is the model name that it answers to."""
    share = profile_of("sglang").memory.share
    profile = list(_CPU_FLAGS) if launch.device == "cpu" else ["--mem-fraction-static", f"{share:.2f}"]
    # Nothing is captured on the CPU. With the flag, SGLang resolves the same arguments for every backend.
    if launch.eager or launch.device == "cpu":
        profile.append("--disable-cuda-graph")
    return [
        launch.interpreter or sys.executable, "-m", MODULE,
        "--model-path", str(launch.model.resolve()),
        "--device", launch.device,
        "--attention-backend", launch.backend,
        "--host", HOST,
        "--port", str(port),
        "--served-model-name", name,
        "--enable-cache-report",
        "--random-seed", "0",  # otherwise SGLang draws one for each server
        *profile,
        *launch.common,
        *launch.engine_args,
    ]  # fmt: skip


def settings(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that assay sets for a server, in addition to those ``inherited``."""
    ours = common_settings(launch, inherited)
    # /health answers 200 only after SGLang's own warm-up request. Without this, every query of /health would generate a token,
    # which takes a second and would be counted as an attention call.
    ours["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    ours |= {dump: "false" for dump in _CRASH_DUMPS if dump not in {**inherited, **launch.extra}}
    if launch.device == "cpu":
        folders = ours["PYTHONPATH"]
        ours |= {"PYTHONPATH": f"{STAND_INS}:{folders}", "SGLANG_USE_CPU_ENGINE": "1"}
        if launch.cpu_core is not None:
            # SGLang wants one for each rank.
            ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([str(launch.cpu_core)] * _ranks(launch))
    return with_extra(launch, ours)


def _ranks(launch: Launch) -> int:
    """Return the number of processes that share the model, by the flags, or 1 if they are not numbers, which SGLang refuses."""
    values = flag_values((*launch.common, *launch.engine_args))
    given = [next((values[name] for name in names if name in values), "1") for names in _RANK_FLAGS]
    return math.prod(int(value) for value in given) if all(map(str.isdigit, given)) else 1
