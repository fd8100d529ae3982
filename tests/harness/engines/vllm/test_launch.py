"""The command line, the environment and the arguments of a vLLM server, without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.harness.engines import failures
from assay.harness.engines.arguments import differences
from assay.harness.engines.launch import Launch
from assay.harness.engines.registry import checked_backend
from assay.harness.engines.vllm import arguments
from assay.harness.engines.vllm.launch import command, settings
from assay.harness.errors import UsageError
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.sides import ROLES, Role

TOLD: dict[str, Any] = {
    "vllm_config": {
        "model_config": {"dtype": "torch.float32", "max_model_len": 4096, "quantization": None, "served_model_name": "n1"},
        "cache_config": {"block_size": 32, "cache_dtype": "auto", "enable_prefix_caching": True, "num_gpu_blocks": 1024},
        "parallel_config": {"tensor_parallel_size": 1, "data_parallel_rpc_port": 29550},
        "scheduler_config": {"max_num_batched_tokens": 256, "enable_chunked_prefill": True},
        "instance_id": "17960",
        "logging_config": {"log_level": "INFO"},
    },
    "vllm_env": {"VLLM_API_KEY": "***"},
}


def make(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "engine": "vllm", "role": "candidate", "backend": "CPU_ATTN", "model": Path("model"), "device": "cpu",
        "evidence": Path("evidence"), "log": Path("server.log"), "decode_backend": "", "startup_timeout": 900.0,
        "request_timeout": 300.0, "cpu_core": 1,
    }  # fmt: skip
    return Launch(**fields | changes)


def told(**changes: Any) -> dict[str, Any]:
    config: dict[str, dict[str, Any]] = {**TOLD["vllm_config"], "instance_id": "other"}
    for section, values in changes.items():
        config[section] = {**config[section], **values}
    return arguments.settled({"vllm_config": config})


def test_a_cpu_server_has_one_thread_and_a_cache_of_known_size() -> None:
    ours, argv = settings(make(), {}), command(make(engine_args=("--block-size=64",)), 7, "name")
    assert (ours["VLLM_CPU_OMP_THREADS_BIND"], ours["OMP_NUM_THREADS"], ours["TORCH_COMPILE_DISABLE"]) == ("1", "1", "1")
    assert "--attention-backend" not in argv, "vLLM ignores it on a CPU"
    assert {"--kv-cache-memory-bytes", "--enforce-eager", "--enable-scale-out"} <= set(argv)
    assert argv[-1] == "--block-size=64", "the last of a flag counts"
    two = settings(make(engine_args=("--tensor-parallel-size=2",)), {})
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "1|1"


def test_on_a_gpu_the_backend_is_named() -> None:
    argv = command(make(device="cuda", backend="FLASHINFER", eager=False), 7, "name")
    assert argv[argv.index("--attention-backend") + 1] == "FLASHINFER"
    assert "--enforce-eager" not in argv
    assert "-cc.cudagraph_mode=PIECEWISE" in argv, "attention of a whole captured pass could not be counted"


def test_a_kernel_takes_the_place_of_a_backend() -> None:
    kernel = make(device="cuda", backend="mine:forward", decode_backend="FLASHINFER")
    argv, ours = command(kernel, 7, "name"), settings(kernel, {})
    assert argv[argv.index("--attention-backend") + 1] == "FLASHINFER"
    assert (ours["ASSAY_KERNEL"], ours["VLLM_USE_V2_MODEL_RUNNER"]) == ("mine:forward", "0")
    assert "--attention-backend" not in command(make(device="cuda", backend="mine:forward"), 7, "name")
    assert settings(make(backend="sage_attn"), {})["ASSAY_KERNEL"] == "sage_attn", "a published name too"
    assert "ASSAY_KERNEL" not in settings(make(), {})


def test_flags_that_assay_sets_and_unknown_backends_are_refused() -> None:
    with pytest.raises(UsageError, match="which assay sets itself"):
        make(engine_args=("--worker-extension-cls=mine",))
    with pytest.raises(UsageError, match="'CPU_ATN'") as refused:
        checked_backend("vllm", "--candidate", "CPU_ATN")
    assert "CPU_ATTN" in refused.value.do


def test_two_servers_of_one_command_line_do_not_differ() -> None:
    assert arguments.differences(told(), told(model_config={"served_model_name": "n2"}, cache_config={"num_gpu_blocks": 9})) == {}
    blocks = told(cache_config={"block_size": 64})
    assert arguments.differences(told(), blocks) == {"cache_config.block_size": ("32", "64")}
    assert arguments.differences(told(), blocks, {"--block-size"}) == {}
    off = told(cache_config={"enable_prefix_caching": False})
    assert arguments.differences(told(), off, {"--no-enable-prefix-caching"}) == {}


def test_limits_are_read_from_the_arguments() -> None:
    limits = arguments.limits_of(told(), 1000)
    assert (limits.context_tokens, limits.chunk_tokens, limits.page_tokens) == (4096, 256, 32)
    assert (limits.prefix_cache, limits.mixed) == (True, False)
    assert arguments.limits_of(told(scheduler_config={"enable_chunked_prefill": False}), 1000).chunk_tokens is None


@pytest.mark.parametrize(("dtype", "expected"), [("float32", {}), ("bfloat16", {"dtype": ("bfloat16", "float32")})])
def test_of_two_engines_only_what_decides_the_numbers_is_compared(dtype: str, expected: dict[str, tuple[str, str]]) -> None:
    of: dict[Role, ServerManifest] = {
        "reference": server("reference", "sglang", {"dtype": dtype, "kv_cache_dtype": "auto", "page_size": 1, "tp_size": 1}),
        "candidate": server("candidate", "vllm", told()),
    }
    assert differences(of, {"engine": ("sglang", "vllm")}) == expected
    assert differences(of, {"--dtype": ("bfloat16", "")}) == {}
    assert list(of) == list(ROLES)


def server(role: Role, kind: Any, given: dict[str, Any]) -> ServerManifest:
    return ServerManifest(role=role, backend="x", engine="x", kind=kind, claimed_phases=("extend",), arguments=given)


@pytest.mark.parametrize(
    ("line", "cause", "do"),
    [
        ("ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])", "block-size", "instead of 16"),
        ("ValueError: To serve at least one request with the model's max seq len (4096)", "memory-share", "--max-model-len"),
        ("ValueError: torch.float32 is not supported for quantization method fp8", "dtype", "that fp8 computes in"),
    ],
)
def test_the_cause_of_a_failed_start_is_named(line: str, cause: str, do: str) -> None:
    log = (
        "(EngineCore pid=2) ERROR 11-30 12:00:00 [core.py:1] EngineCore failed to start.\n"
        "(EngineCore pid=2) Traceback (most recent call last):\n"
        '(EngineCore pid=2)   File "/v/vllm/v1/engine/core.py", line 1, in run\n'
        f"(EngineCore pid=2) {line}\n"
        "(APIServer pid=1) Traceback (most recent call last):\n"
        '(APIServer pid=1)   File "/v/vllm/entrypoints/a.py", line 1, in run\n'
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    read = failures.read(log, "vllm")
    assert (read.cause, do in read.do) == (cause, True), read
    assert line[:30] in read.line
    assert failures.read(log, "sglang").cause != cause, "the cause is vLLM's own"


def test_a_silent_end_with_status_0_is_a_failure() -> None:
    error = failures.ended("vllm", "the server", "exited with status 0", "after it was ready", "INFO: all is well\n", "")
    assert error.found == "the server exited with status 0 after it was ready."
