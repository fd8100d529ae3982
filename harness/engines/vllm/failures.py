"""Causes of failures that only vLLM's logs name; `assay.harness.engines.failures` has all others."""

from __future__ import annotations

import re

# fmt: off
CAUSES = tuple((cause, re.compile(pattern, re.IGNORECASE | re.DOTALL), remedy) for cause, pattern, remedy in (
    ("memory-share", r"Available memory on node \d+ .*less than desired|Free memory on device .*less than desired",
     "give the KV cache a size: --engine-arg=--kv-cache-memory-bytes=268435456, or on a GPU a smaller --gpu-memory-utilization"),
    ("memory-share", r"No available memory for the cache blocks|To serve at least one request with the model's max seq len",
     "give the KV cache more (--engine-arg=--kv-cache-memory-bytes=...), or requests less (--engine-arg=--max-model-len=...)"),
    ("block-size", r"No common block size for (\d+)",
     "leave --block-size out, or name a multiple of 32, which vLLM's CPU attention has instead of {0}"),
    ("threads", r"Not enough allowed NUMA nodes to bind threads",
     "name a core for each rank: --reference-env and --candidate-env with VLLM_CPU_OMP_THREADS_BIND=0|1"),
    ("jit-compiler", r"InvalidCxxCompiler|No working C\+\+ compiler found",
     "leave TORCH_COMPILE_DISABLE at 1, or install a C++ compiler"),
    ("missing-package", r"Model Runner V2 requires Triton", "leave VLLM_USE_V2_MODEL_RUNNER unset on a CPU"),
    ("missing-package", r"No package metadata was found for vllm", "start the module vllm.entrypoints.openai.api_server instead"),
    ("dtype", r"torch\.\w+ is not supported for quantization method (\w+)",
     "name a dtype that {0} computes in: --engine-arg=--dtype=bfloat16"),
    ("dtype", r"_scaled_fp8_quant\(\) expected at most", "serve a model without FP8 weights: on a CPU they need AMX"),
))
# fmt: on
