"""Facts about SGLang that assay knows before it starts one: see `assay.harness.sides.profile_of`."""

from __future__ import annotations

from assay.harness.sides import EngineProfile

PROFILE = EngineProfile(
    title="SGLang",
    references={"cpu": "torch_native", "cuda": "triton"},
    # Sources: SGLang's `triton_ops`, PyTorch's operator and flex-attention template, FlashAttention 3's `flash_fwd_kernel_sm90.h`,
    # and FlashInfer's `prefill.cuh` and `decode.cuh`.
    kernels={
        "triton": ("^_fwd_(grouped_)?kernel(_|$)",),
        "torch_native": ("scaled_dot_product|native_sdpa|fmha_cutlassF|pytorch_flash::",),
        "flex_attention": ("flex_attention",),
        "fa3": ("flash::FlashAttnFwd",),
        "flashinfer": ("flashinfer::.*(Prefill|Decode)With",),
    },
    settings={
        "--kv-cache-dtype": "{} KV cache",
        "--quantization": "{} weights",
        "--dtype": "{} activations",
        "--chunked-prefill-size": "prefill in chunks of {} tokens",
        "--page-size": "pages of {} tokens",
        "--disable-radix-cache": "disabled prefix cache",
        "--disable-cuda-graph": "disabled CUDA graphs",
        "--enable-torch-compile": "torch.compile",
        "--tp-size": "tensor parallelism over {}",
        "--random-seed": "seed {}",
    },
    noise={
        ("--kv-cache-dtype", "fp8_e4m3"): "fp8_kv",
        ("--kv-cache-dtype", "fp8_e5m2"): "fp8_e5m2_kv",
    },
)
