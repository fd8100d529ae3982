"""SGLang's own attention backends as kernels of the contract, without a server: ``sglang:triton``.

A backend reads K and V from a pool, through a block table. Each call is therefore laid out as a server would have left it: the
prefix is in an SGLang KV pool, and the backend itself writes the new tokens to it. The pool is adversarial: its pages and the rows
of the block table are shuffled, and everything that does not belong to the call is stale.

The model runner, the pool and the server arguments are those of SGLang's own attention kit (``sglang.test.kits``), since each
version of SGLang keeps its kit in step with its backends. Global state of SGLang is set for a call, and restored after it.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import warnings
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, KernelRefused, cumulative, default_device
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.attention.paging import STALE, shuffled_pages, slots_in
from assay.harness.attention.sample_calls import call_of, latent_call
from assay.harness.engines.registry import LayerRequest
from assay.harness.engines.sglang.launch import STAND_INS
from assay.harness.errors import UsageError
from assay.harness.text import did_you_mean

_KITS = "sglang.test.kits.attention_unittest.attention_methods"
_KIT = f"{_KITS}.dense_attention"
_GROUPS = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp", "dcp")
# SGLang's groups of ranks, instead of initialising ``torch.distributed``. The kit provides less, which is too little for
# flashinfer in 0.5.17.
_ONE_RANK: dict[str, int] = dict.fromkeys([f"{group}_size" for group in _GROUPS], 1) | dict.fromkeys(
    [f"{group}_rank" for group in _GROUPS] + ["dcp_enabled"], 0
)
_HALF = ("float16", "bfloat16")
# Dtypes of the backends whose kernels do not support float32: FlashAttention's and FlashInfer's.
_DTYPES = {"fa3": _HALF, "fa4": _HALF, "flashinfer": _HALF, "trtllm_mha": _HALF}
# Dtypes of backends whose kernels are interpreted on a CPU: Triton's interpreter computes bfloat16 as integers, its bits.
_INTERPRETED_DTYPES = {"triton": ("float16", "float32")}
# Features that a layer can ask a backend for. `assay backends --honours` measures whether it computes them.
_OF_LAYERS = ("window", "softcap", "temperature", "sinks")
# SGLang's names of dtypes of the KV pool, which some backends check in addition to the dtype.
_CACHE_DTYPES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
# The dtype that SGLang's gpt-oss gives a backend's sinks, if it is not bfloat16.
_SINKS = {"trtllm_mha": torch.float32}
# Backends only for latent attention, with the page size in tokens that each needs.
LATENT_PAGES = {"flashmla": 64, "cutlass_mla": 128, "trtllm_mla": 64, "cutedsl_mla": 64}
# (new tokens, cached prefix) of the calls on which a backend is tested.
_TRIAL = {"extend": (2, 1), "decode": (1, 2)}
# Least batch, and least length in tokens, of a runner: most calls of the matrix with the same heads and dtype share one.
_LEAST_BATCH, _LEAST_LENGTH = 4, 512
# Most runners to keep, each with a KV pool.
_KEPT = 4


class NativeKernel:
    """One of SGLang's attention backends as a kernel of the contract. Made by `kernel`.

    Attributes:
        assay: its declaration.
        backend: the backend's name, as SGLang registers it.
    """

    def __init__(self, name: str, backend: str, page: int, declared: Declaration) -> None:
        self.assay = declared
        self.backend = backend
        self._name, self._page, self._device = name, page, default_device()

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute the output, [total_q, num_q_heads, head_dim].

        Raises:
            KernelRefused: the backend is not made for such a call. Also anything that the backend raises.
        """
        wants = {
            "attention that is not causal": not call.causal,
            "a latent KV cache": call.spec.layout == "v in k",
            "V of another head_dim than K": call.v.shape[2] != call.k.shape[2],
            "a sequence without a new token": 0 in call.lens_q,
            "several new tokens of a sequence in decode": call.phase == "decode" and max(call.lens_q) > 1,
            f"tensors on {call.q.device.type}; SGLang is set up for {self._device} here": call.q.device.type != self._device,
        }  # fmt: skip
        if what := " and ".join(feature for feature, wanted in wants.items() if wanted):
            raise KernelRefused(f"{self._name} is not made for this call, which has {what}")
        return self.attempt(call, LayerRequest())

    def attempt(self, call: AttentionCall, layer: LayerRequest) -> Tensor:
        """Have the backend compute a call for a layer that asks for more than the contract has, whatever happens.

        Raises:
            Exception: anything that the backend raises.
        """
        length = _power_of_two(max(call.lens_k), max(_LEAST_LENGTH, self._page))
        in_pages = sum(-(-tokens // self._page) * self._page for tokens in call.lens_k)
        heads, kv_heads, head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[2]
        runner = _runner(
            _Shape(
                self.backend, self._device, self._page, heads, kv_heads, head_dim, call.v.shape[2], call.q.dtype,
                batch=_power_of_two(len(call.lens_k), _LEAST_BATCH), length=length,
                room=_power_of_two(in_pages + 1, _LEAST_BATCH * length), window=call.spec.mask.window,
                stored=layer.stored, drafts=call.lens_q[0] if layer.drafts else 0,
                latent_scale=call.scale if call.spec.layout == "v in k" else 0.0,
            )
        )  # fmt: skip
        return runner.attend(call, layer)


@cache
def kernel(backend: str) -> NativeKernel:
    """Make the kernel of one of SGLang's attention backends, such as "triton", or "triton@16" with pages of 16, and try it.

    Raises:
        KernelRefused: the backend does not exist, it cannot compute on this machine, or SGLang fails when it is imported.
        ImportError: a package is not installed.
    """
    name, at, page = backend.partition("@")
    if at and not (page.isdecimal() and int(page).bit_count() == 1):
        raise KernelRefused(f"{backend!r} has the page size {page!r}, expected a power of two, as in {name}@16")
    try:
        sglang = f"SGLang {_sglang().__version__}"
    except ImportError:
        raise
    except Exception as error:  # raised, for example, with a package of another version than it needs
        raise KernelRefused(f"SGLang cannot be imported: {_said(error)}") from error
    if name not in _registry():
        near = did_you_mean(name, sorted(_registry()))
        raise KernelRefused(
            f"{sglang} has no attention backend {name!r}{near and ', ' + near[:-1]}; it has {', '.join(sorted(_registry()))}"
        )
    dtypes = _INTERPRETED_DTYPES if default_device() == "cpu" else _DTYPES
    declared = Declaration(
        package="sglang", about=f"{sglang}'s own {name}", dtypes=dtypes.get(name), features=_OF_LAYERS
    )
    if name in kernels.published():  # assay's plugin registers them
        declared = declaration(kernels.load(name))
    made = NativeKernel(f"sglang:{backend}", name, int(page or LATENT_PAGES.get(name, 1)), declared)
    device, of_latents = default_device(), name in LATENT_PAGES
    for phase in declared.phases:
        lens, dims = [_TRIAL[phase]], declared.head_dims or (64,)
        tried = (
            latent_call(lens, torch.bfloat16, device)
            if of_latents
            else call_of(lens, (4, 2), dims[0], torch.float16, device)
        )
        tried = tried.with_spec(phase=phase)
        try:
            _ = made.attempt(tried, LayerRequest()) if of_latents else made(tried)
        except Exception as error:  # SGLang's backends assert, or fail in a library for another device
            raise KernelRefused(
                f"{sglang}'s attention backend {name!r} cannot compute on this machine ({device}): {_said(error)}"
            ) from error
    return made


def _said(error: Exception) -> str:
    """Describe an exception by its name and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"


def _prefix_of(call: AttentionCall, new: Tensor) -> AttentionCall:
    """Return the call that prefills the cached prefixes of another one. `new` marks the tokens of that one, bool [total_k]."""
    k, v = call.k[~new], call.v[~new]
    lens = cumulative([length for length in call.prefixes if length], call.q.device)
    q = call.q.new_zeros(len(k), *call.q.shape[1:])
    return replace(call.with_spec(phase="extend"), q=q, k=k, v=v, cu_seqlens_q=lens, cu_seqlens_k=lens)


def _before(window: int) -> int | None:
    """Return a window as SGLang's layers have it: the number of keys before a query's own, or None without a window."""
    return window - 1 if window else None


def _power_of_two(number: int, least: int) -> int:
    """Return the least power of two that reaches both."""
    return 1 << (max(number, least) - 1).bit_length()


def version() -> str:
    """Return the installed version of SGLang.

    Raises:
        ImportError: it is not installed.
    """
    return str(_sglang().__version__)


@cache
def _sglang() -> Any:
    """Import SGLang, with its plugins. Without a GPU, it is set up for the CPU, as in `assay.harness.engines.sglang.launch`.

    Raises:
        ImportError: it is not installed.
    """
    if default_device() == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        if str(STAND_INS) not in sys.path:
            sys.path.insert(0, str(STAND_INS))
    known = _KIT in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about features of other devices
        import sglang
        from sglang.srt.plugins import load_plugins

        load_plugins()
        try:
            kit = importlib.import_module(_KIT)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"SGLang's backends cannot run outside of a server: its installation lacks {error.name}.",
                f"a whole SGLang: {_KIT} makes the pools that a backend reads from",
                "install sglang from its wheel, with its tests",
            ) from error
    if not known:
        kit._parallel_override.__exit__(None, None, None)  # the kit would leave it on
    return sglang


def _takes_rope_apart() -> tuple[str, ...]:
    """Return the backends to which DeepSeek's layers give the dims with RoPE as separate arguments."""
    from sglang.srt.models.deepseek_common import utils

    return tuple(utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS)


def _registry() -> dict[str, Any]:
    """Return SGLang's attention backends: name -> function of a model runner."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    backends: dict[str, Any] = ATTENTION_BACKENDS
    return backends


@dataclass(frozen=True)
class _Shape:
    """The shape that a runner is built for: at most `batch` sequences of at most `length` tokens, `room` tokens in total."""

    backend: str
    device: str
    page: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    batch: int
    length: int
    room: int
    window: int = 0
    stored: torch.dtype | None = None
    drafts: int = 0
    latent_scale: float = 0.0
    """The scale of scores with a cache of latents, for the plan of FlashInfer's MLA backend; 0 for a cache of K and V."""


@lru_cache(_KEPT)
def _runner(shape: _Shape) -> _Runner:
    # Calls come in any mode of autograd, and only inference mode can write to a buffer that was made in it.
    with torch.inference_mode(False):
        return _Runner(shape)


class _Runner:
    """A backend with its own model runner and KV pool."""

    def __init__(self, shape: _Shape) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.runtime_context import get_parallel

        self._shape = shape
        with get_parallel().override(**_ONE_RANK):
            self._runner = self._of_latents(shape) if shape.latent_scale else self._of_heads(shape)
            self._arguments = self._runner._server_args_override
            if shape.stored:
                self._runner.kv_cache_dtype_str = _CACHE_DTYPES[shape.stored]
            try:
                self._backend = _registry()[shape.backend](self._runner)
            finally:
                self._arguments.restore()
        if shape.drafts:
            self._backend.topk = 1  # a chain
        self._pool, self._table = self._runner.token_to_kv_pool, self._runner.req_to_token_pool.req_to_token
        self._layer = RadixAttention(
            num_heads=shape.heads, head_dim=shape.head_dim, scaling=1.0, num_kv_heads=shape.kv_heads, layer_id=0,
            v_head_dim=shape.head_dim_v, sliding_window_size=_before(shape.window) or -1,
        )  # fmt: skip

    def _of_latents(self, shape: _Shape) -> Any:
        """Make a model runner with a cache of latents."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        kit = importlib.import_module(f"{_KITS}.mla_attention")
        case = kit.MLAAttentionCase(
            name=shape.backend, backend=shape.backend, num_heads=shape.heads, page_size=shape.page, forward_mode=ForwardMode.EXTEND,
            prefix_lens=(0,), extend_lens=(1,),
        )  # fmt: skip
        dims = {"kv_lora_rank": shape.head_dim_v, "qk_rope_head_dim": shape.head_dim - shape.head_dim_v}
        config = kit.TinyMLAModelConfig(
            num_heads=shape.heads, hidden_size=shape.heads * shape.head_dim, context_len=shape.length, **dims
        )
        # The kit's scale is for the 576 dims; DeepSeek's, for the 192 before absorption.
        config.scaling = shape.latent_scale
        return kit.MockMLAModelRunner(
            case=case, model_config=config, dtype=shape.dtype, device=shape.device, max_context_len=shape.length,
            runner_batch_size=shape.batch, **dims,
        )  # fmt: skip

    def _of_heads(self, shape: _Shape) -> Any:
        """Make a model runner with a cache of K and V."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        kit = importlib.import_module(_KIT)
        case = kit.DenseAttentionCase(
            name=shape.backend, backend=shape.backend, num_heads=shape.heads, num_kv_heads=shape.kv_heads, page_size=shape.page,
            forward_mode=ForwardMode.TARGET_VERIFY if shape.drafts else ForwardMode.EXTEND, prefix_lens=(0,),
            extend_lens=(shape.drafts or 1,),
            sliding_window_size=_before(shape.window),
        )  # fmt: skip
        config = kit.TinyModelConfig(
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            hidden_size=shape.heads * shape.head_dim, context_len=shape.length, sliding_window_size=_before(shape.window),
        )  # fmt: skip
        config.v_head_dim = config.swa_v_head_dim = shape.head_dim_v
        config.is_encoder_decoder = config.is_multimodal = False
        config.is_local_attention_model = False  # a window, in a configuration, is not chunked local attention
        runner = kit.MockModelRunner(
            case=case, model_config=config, dtype=shape.dtype, device=shape.device, max_context_len=shape.length,
            head_dim=shape.head_dim, runner_batch_size=shape.batch,
        )  # fmt: skip
        # The kit's own pool has room for every sequence at full length: gigabytes for a crowd with one long sequence.
        runner.token_to_kv_pool = self._pool_of(shape)
        runner.kv_cache_dtype = shape.stored or shape.dtype
        return runner

    def _pool_of(self, shape: _Shape) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool(
            size=shape.room, page_size=shape.page, dtype=shape.stored or shape.dtype,
            head_num=shape.kv_heads, head_dim=shape.head_dim, v_head_dim=shape.head_dim_v, layer_num=1, device=shape.device,
            enable_memory_saver=False, enable_alt_stream=False,
        )  # fmt: skip

    def attend(self, call: AttentionCall, asked: LayerRequest) -> Tensor:
        """Lay out the call and compute it, [total_q, num_q_heads, head_dim], with SGLang's global state that of a forward pass."""
        from sglang.srt.layers.radix_attention import AttentionType
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.runtime_context import get_parallel

        rows, slots = self._placed(call)
        is_new = torch.cat([torch.arange(n) >= p for n, p in zip(call.lens_k, call.prefixes, strict=True)])
        slots, new = slots.to(call.k.device), is_new.to(call.k.device)
        layer = self._layer
        layer.scaling, layer.layer_id, layer.logit_cap = call.scale, call.layer, call.spec.softcap
        layer.xai_temperature_len = call.spec.temperature or -1
        layer.attn_type = AttentionType.DECODER if call.causal else AttentionType.ENCODER_ONLY
        layer.k_scale_float, layer.v_scale_float = scales = asked.scales or (None, None)
        layer.k_scale, layer.v_scale = (
            None if scale is None else torch.tensor(scale, device=call.q.device) for scale in scales
        )
        sinks = torch.tensor(
            call.spec.sinks, device=call.q.device, dtype=_SINKS.get(self._shape.backend, torch.bfloat16)
        )
        more = {"sinks": sinks} if call.spec.sinks else {}
        apart = bool(self._shape.latent_scale) and self._shape.backend in _takes_rope_apart()
        self._pool.start_layer = call.layer  # the pool has one layer
        context = ForwardContext(attn_backend=self._backend)

        # A copy of the arguments, since they cannot be entered again inside.
        with get_parallel().override(**_ONE_RANK), copy.copy(self._arguments), torch.no_grad():
            for buffer in (self._pool.get_key_buffer(call.layer), self._pool.get_value_buffer(call.layer)):
                buffer.fill_(STALE)
            if any(call.prefixes) and asked.scales is None:
                self._pool.set_kv_buffer(layer, KVWriteLoc(slots[~new], None), call.k[~new], call.v[~new])
            elif any(call.prefixes):  # the backend decides whether to scale K and V when it writes them
                prefix, its_rows = _prefix_of(call, new), rows[torch.tensor(call.prefixes) > 0]
                written = self._batch(prefix, its_rows, slots[~new])
                with forward_context(context):
                    self._backend.init_forward_metadata(written)
                    layer(prefix.q.flatten(1), prefix.k, prefix.v, written, save_kv_cache=True)
            batch = self._batch(call, rows, slots[new])
            q, k, v = call.q.flatten(1), call.k[new], call.v[new]
            if apart:
                latent = self._shape.head_dim_v
                more |= {"q_rope": call.q[..., latent:].contiguous(), "k_rope": k[..., latent:].contiguous()}
                q, k = call.q[..., :latent].contiguous(), k[..., :latent].contiguous()
            with forward_context(context):
                self._backend.init_forward_metadata(batch)
                out: Tensor = layer(q, k, v, batch, save_kv_cache=True, **more)
            return out.reshape(*call.q.shape[:2], call.v.shape[2])

    def _placed(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Write the block table. Returns the row of each sequence, int64 [batch], and the slot of each token, int64 [total_k].

        Pages and rows are drawn at random, the same for calls of the same lengths. The first row and page are SGLang's padding.
        """
        generator = torch.Generator().manual_seed(0)
        page = self._shape.page
        pages = shuffled_pages(call.lens_k, page, self._shape.room // page, generator)
        rows = 1 + torch.randperm(self._shape.batch, generator=generator)[: len(pages)]
        table = torch.zeros(self._table.shape, dtype=torch.int32)  # beyond its sequence, a row names a stale slot
        slots = []
        for row, own, length in zip(rows.tolist(), pages, call.lens_k, strict=True):
            slots.append(slots_in(1 + own, page, length))
            table[row, :length] = slots[-1].int()
        self._table.copy_(table)
        return rows, torch.cat(slots)

    def _batch(self, call: AttentionCall, rows: Tensor, written: Tensor) -> Any:
        """Make the ForwardBatch, with the dtypes that SGLang's scheduler gives it. `written` are the slots of the new tokens."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        drafts, device = self._shape.drafts, call.q.device
        lens = torch.tensor(call.prefixes if drafts else call.lens_k)
        positions = [torch.arange(p, n) for p, n in zip(call.prefixes, call.lens_k, strict=True)]
        modes = {"decode": ForwardMode.DECODE, "extend": ForwardMode.TARGET_VERIFY if drafts else ForwardMode.EXTEND}
        batch = ForwardBatch(
            forward_mode=modes[call.phase],
            batch_size=len(call.lens_k),
            input_ids=torch.zeros(call.q.shape[0], dtype=torch.int64, device=device),
            req_pool_indices=rows.to(device),
            seq_lens=lens.to(device),
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=written,
            positions=torch.cat(positions).to(device),
        )
        if drafts:
            batch.spec_info = self._verified(call, batch)
        elif call.phase == "extend":
            batch.extend_num_tokens = call.q.shape[0]
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = call.lens_q, call.prefixes
            batch.extend_seq_lens = torch.tensor(call.lens_q, dtype=torch.int32, device=device)
            batch.extend_prefix_lens = torch.tensor(call.prefixes, dtype=torch.int32, device=device)
            batch.extend_start_loc = call.cu_seqlens_q[:-1].clone()
        if hasattr(self._runner, "kv_index_translator"):  # in 0.5.23, not in 0.5.17
            self._runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def _verified(self, call: AttentionCall, batch: Any) -> Any:
        """Make the data of a batch that verifies drafts: the mask of the whole prefix and the drafts, flat, by sequence."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        device, drafts, count = call.q.device, self._shape.drafts, len(call.lens_q)
        masks = [
            torch.ones(drafts, prefix + drafts, dtype=torch.bool, device=device).tril(prefix).flatten()
            for prefix in call.prefixes
        ]
        unread = torch.full((count, drafts), -1, dtype=torch.int64, device=device)  # of the sampler, which does not run
        return EagleVerifyInput(
            draft_token=batch.input_ids, custom_mask=torch.cat(masks), positions=batch.positions, retrieve_index=unread,
            retrieve_next_token=unread, retrieve_next_sibling=unread, retrieve_cum_len=call.cu_seqlens_q, spec_steps=drafts - 1,
            topk=1, draft_token_num=drafts, capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=batch.seq_lens_sum, seq_lens_cpu=batch.seq_lens_cpu,
        )  # fmt: skip
