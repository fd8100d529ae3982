"""Facts about SGLang that assay knows before it starts one: see `assay.harness.sides.profile_of`."""

from __future__ import annotations

from assay.harness.sides import EngineProfile, MemoryProfile

# Causes of failures that only SGLang's logs name, as `assay.harness.engines.failures` has all others.
# fmt: off
_CAUSES = (
    ("memory-share", r"no GPU memory for the KV cache.*?above (?:0\.(?:8[3-9]|9)|[1-9])", "use a smaller --model"),
    ("memory-share", r"leave no GPU memory for the KV cache.*?above 0\.(?:4[3-9]|[5-9])",
     "run one server at a time: --servers=in-turn --engine-arg=--mem-fraction-static=0.85"),
    ("memory-share", r"leave no GPU memory for the KV cache|(?:increase|raise) --mem-fraction-static",
     "repeat the command with --engine-arg=--mem-fraction-static=0.45, or 0.85 and --servers=in-turn where it had as much"),
)
# fmt: on

PROFILE = EngineProfile(
    title="SGLang",
    distributions=("sglang",),
    oldest="0.5.17",
    references={"cpu": "torch_native", "cuda": "triton"},
    # Triton's kernels are interpreted. The others (0.5.23) end a server while it starts: they check for a GPU architecture, or for
    # packages that need one.
    cpu_backends=("torch_native", "triton", "flex_attention", "intel_amx"),
    limits=("--context-length", "--max-total-tokens"),
    own_flags=(
        "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend", "--model-path", "--device",
        "--host", "--port", "--served-model-name", "--api-key",
    ),
    example_flag="--page-size=16",
    # The three processes of a CPU server take about 2 GiB (measured, 0.5.23); one more is for the KV cache and activations. bf16
    # weights become fp32 (twice the bytes), and half of them exist a second time while they are loaded.
    memory=MemoryProfile(3 * 2**30, 2.5, "--mem-fraction-static", 0.40),
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
    install="pip install sglang; without a GPU, make the environment with nox -s accuracy in a clone of assay",
    merging=("flashinfer",),
    causes=_CAUSES,
)  # fmt: skip
