"""The kernel contract: one packed ("varlen") attention call, with the engine's paging already resolved.

The same kernel therefore runs in a CPU server, a GPU server, a replay and a unit test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:  # the command line reads what kernels declare and must not wait for torch
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

_PACKED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
STORED = ("stored_k", "stored_v", "k_scale", "v_scale")
"""Names of the tensors of `StoredKV` among those of a call."""
BY_KEY = ("k", "v", *STORED)
"""The tensors that have a row for each key, or one for all, and then a kv head, or one for all."""


_Ints = TypeVar("_Ints", int, "NDArray[np.int64]", "Tensor")
"""Indices: one, or an array or a tensor of them."""


@dataclass(frozen=True)
class Mask:
    """The keys of its own sequence that each query sees. All code that depends on it uses `span` or `visible`.

    Attributes:
        causal: right-aligned: query i of a sequence sees keys j <= i + (len_k - len_q). False: every query sees every key;
            there may be any number: in cross attention they are those of another sequence.
        window: most keys that a query sees, its own and those right before it; 0 for no limit. Only with `causal`. Engines count
            differently: SGLang's layers have `window - 1`, the number of keys before its own.

    Raises:
        ValueError: a window without `causal`, or a negative one.
    """

    causal: bool = True
    window: int = 0

    def __post_init__(self) -> None:
        if self.window < 0 or (self.window and not self.causal):
            raise ValueError(
                f"a mask has window={self.window} and causal={self.causal}; expected a number of keys, 0 for all of them, "
                "and a causal mask for a window"
            )

    def span(self, rows: _Ints, len_q: int | _Ints, len_k: int | _Ints) -> tuple[int | _Ints, _Ints]:
        """Return the first key that queries see, and one past the last. A query with an empty range sees none.

        Args:
            rows: indices of the queries among the new tokens of their sequence.
            len_q: new tokens of the sequence, or of each query's sequence, broadcasting to `rows`.
            len_k: all tokens of the same, broadcasting to `rows`.
        """
        stop = rows + len_k - len_q + 1 if self.causal else rows * 0 + len_k
        return (stop - self.window) * (stop > self.window) if self.window else 0, stop

    def visible(self, rows: Tensor, len_q: int | Tensor, len_k: int | Tensor, keys: Tensor | None = None) -> Tensor:
        """Return which keys each query sees, bool [*rows.shape, len_k], on the device of `rows`.

        Args:
            rows: int64, see `span`.
            len_q: see `span`.
            len_k: see `span`.
            keys: int64 [keys], the keys to ask about, by default all `len_k`, which is then an int.
        """
        import torch

        if keys is None:
            keys = torch.arange(len_k, device=rows.device)  # type: ignore[arg-type]  # see above
        first, stop = self.span(rows, len_q, len_k)
        seen = keys < stop[..., None]
        return seen if isinstance(first, int) and first == 0 else seen & (keys >= torch.as_tensor(first)[..., None])


@dataclass(frozen=True)
class _HeadMap:
    """The kv head that each q head reads: consecutive q heads share one, and q heads are a multiple of kv heads."""

    q_heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        """q heads per kv head."""
        return self.q_heads // self.kv_heads

    def kv_head(self, head: _Ints) -> _Ints:
        """Return the kv head that each of these q heads reads."""
        return head // self.group

    def readers(self, kv_head: int) -> slice:
        """Return the q heads that read a kv head."""
        return slice(kv_head * self.group, (kv_head + 1) * self.group)


@dataclass(frozen=True)
class CallSpec:
    """The request of a call: everything except its tensors.

    Attributes:
        scale: softmax scale, natural-exponent convention: weights are softmax(scale * q k^T).
        mask: the keys that a query sees.
        layer: index of the calling layer.
        phase: "extend" (prefill, with or without a cached prefix) or "decode".
        first_head: number in the model of the first q head: in a call of one tensor-parallel process, or of some heads.
        layout: how `AttentionCall.clone` lays q, k and v out in memory: "packed"; "sliced", in which each is a part of a wider
            tensor, as where a model splits one projection into the three; "heads first", in which all tokens of a head lie
            together; "each its own", in which q is packed, and k and v are parts of tensors of different widths; or "v in k", in
            which v is a view of the first head_dim_v dims of k. The last axis is contiguous in each. "v in k" is how absorbed
            latent attention (MLA, DeepSeek's) reads its cache: one kv head of 576 dims, whose first 512 are v. The engine has
            applied RoPE to the last 64 dims of q and k, and multiplied q by the projection from latent dims to keys; it multiplies
            the output by that to values. `scale` is that of the head dim before, 192 ** -0.5.
        grad_mode: autograd mode under which checks call a kernel, named like PyTorch's functions: "inference_mode", "no_grad" or
            "enable_grad", or an empty string for the caller's mode.
        on_grid: whether storing q, k, v or the weights in fewer bits is exact: q, k and v are 0 or of one size, and weights are 0
            or 1 unless nothing stores them. Any difference is then structural.
        softcap: scores s become softcap * tanh(s / softcap) before the softmax, as in Gemma 2 and Grok; 0 for no cap.
        temperature: the scores of a query at position p of its sequence, counted from 0, are multiplied by
            log(p) / log(temperature) where p > temperature, as in Grok (SGLang's `xai_temperature_len`); 0 for no temperature.
        sinks: for each q head, the score of a key that every query sees and whose v is 0, as in gpt-oss; empty without sinks.
        padded_rows: rows at the end of q that belong to no sequence, as in a captured graph of a larger batch. A kernel still
            returns an output of q's shape; its padded rows are ignored.
        ways: ways in which an adapter should call a function with a known signature, as engines do; see
            `assay.harness.attention.adapters.adapter`. They do not change the result.

    Raises:
        ValueError: a negative soft cap, or a temperature of 1 or less.
    """

    scale: float
    mask: Mask = Mask()
    layer: int = 0
    phase: Literal["extend", "decode"] = "extend"
    first_head: int = 0
    layout: Literal["packed", "sliced", "heads first", "each its own", "v in k"] = "packed"
    grad_mode: Literal["", "inference_mode", "no_grad", "enable_grad"] = ""
    on_grid: bool = False
    softcap: float = 0.0
    temperature: int = 0
    sinks: tuple[float, ...] = ()
    padded_rows: int = 0
    ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.softcap < 0 or self.temperature < 0 or self.temperature == 1:
            raise ValueError(
                f"a call has softcap={self.softcap} and temperature={self.temperature}; expected 0 for none, or a positive soft "
                "cap and a temperature of 2 or more"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that it asks for beyond plain attention; see `AttentionCall.features`."""
        asked = {
            "window": self.mask.window, "softcap": self.softcap, "temperature": self.temperature, "sinks": self.sinks,
            "padding": self.padded_rows, "mla": self.layout == "v in k",
        }  # fmt: skip
        return tuple(name for name, value in asked.items() if value)


FEATURES = ("window", "softcap", "temperature", "sinks", "padding", "not_causal", "mla", "stored_kv", "lse")
"""Features that kernels declare: those that a call may ask for (see `AttentionCall.features`); "not_causal", without which a
kernel may get calls that are not causal, but none with a sequence of fewer keys than queries; and "lse" for kernels that return
log-sum-exps on every call (see `Outputs`)."""
WITHOUT_LSE = "without LSE"
"""A value of `CallSpec.ways`: an adapted function is not asked for log-sum-exps, although it has them."""


@dataclass(frozen=True)
class StoredKV:
    """K and V as a cache of 8 bits stores them.

    Attributes:
        k: stored K in the shape of the call's k, which is ``k * k_scale`` in the dtype of q.
        v: stored V, in the same way.
        k_scale: float32, broadcasting to `k`: [1, 1, 1] for one scale per tensor, [1, num_kv_heads, 1] per head, or [total_k,
            num_kv_heads, 1] per token and head. Scales within a block of tokens are equal.
        v_scale: the scale of `v`, in the same layout.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor


@dataclass(frozen=True)
class AttentionCall:
    """One attention call over a batch of sequences laid end to end: tensors and a request.

    Attributes:
        q: queries [total_q, num_q_heads, head_dim].
        k: keys [total_k, num_kv_heads, head_dim], cached prefix included.
        v: values [total_k, num_kv_heads, head_dim_v], cached prefix included.
        cu_seqlens_q: int32 [batch + 1]; sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
        cu_seqlens_k: int32 [batch + 1], the same for k and v; may be the same tensor.
        spec: the request.
        stored: k and v as the cache stores them, or None for a cache in the dtype of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    spec: CallSpec
    stored: StoredKV | None = None

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], spec: CallSpec) -> AttentionCall:
        """Make a call from tensors, named as in `tensors`; ignore others."""
        stored = StoredKV(*(tensors[name] for name in STORED)) if STORED[0] in tensors else None
        return cls(**{name: tensors[name] for name in _PACKED}, spec=spec, stored=stored)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        packed = {name: getattr(self, name) for name in _PACKED}
        return packed if self.stored is None else packed | dict(zip(STORED, vars(self.stored).values(), strict=True))

    def with_tensors(self, changed: Mapping[str, Tensor]) -> AttentionCall:
        """Return the call with other tensors, named as in `tensors`."""
        return self.of_tensors({**self.tensors, **changed}, self.spec)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its features beyond plain attention. A kernel that does not declare all of them does not get the call."""
        named = (*self.spec.features, *("stored_kv",) * (self.stored is not None))
        fewer_keys = not self.causal and min(self.prefixes, default=0) < 0
        return (*named, "not_causal") if fewer_keys else named

    @property
    def rows(self) -> int:
        """Rows of q that belong to a sequence."""
        return self.q.shape[0] - self.spec.padded_rows

    @property
    def scale(self) -> float:
        """Softmax scale, natural-exponent convention."""
        return self.spec.scale

    @property
    def causal(self) -> bool:
        """True if the mask is the right-aligned causal one; otherwise every query sees every key."""
        return self.spec.mask.causal

    @property
    def layer(self) -> int:
        """Index of the calling layer."""
        return self.spec.layer

    @property
    def phase(self) -> Literal["extend", "decode"]:
        """ "extend" (prefill, with or without a cached prefix) or "decode"."""
        return self.spec.phase

    @property
    def heads(self) -> _HeadMap:
        """The kv head that each q head reads."""
        return _HeadMap(self.q.shape[1], self.k.shape[1])

    @property
    def lens_q(self) -> list[int]:
        """New tokens per sequence."""
        return list(self.cu_seqlens_q.diff().tolist())

    @property
    def lens_k(self) -> list[int]:
        """All tokens per sequence: cached prefix and new tokens."""
        return list(self.cu_seqlens_k.diff().tolist())

    @property
    def prefixes(self) -> list[int]:
        """Cached prefix per sequence, in tokens: len_k - len_q."""
        return [k - q for q, k in zip(self.lens_q, self.lens_k, strict=True)]

    def with_spec(self, **changes: Any) -> AttentionCall:
        """Return a call with the same tensors, and changed fields of `CallSpec`."""
        return replace(self, spec=replace(self.spec, **changes))

    def of_heads(self, q_heads: Sequence[int], kv_heads: Sequence[int]) -> AttentionCall:
        """Return the call of some heads, by index: each kv head with the same number of q heads."""
        heads = {"q": list(q_heads)} | {key: list(kv_heads) for key in BY_KEY}
        kept = {
            name: tensor[:, heads[name]] if tensor.shape[1] > 1 or name in ("q", "k", "v") else tensor
            for name, tensor in self.tensors.items()
            if name in heads
        }
        sinks = tuple(self.spec.sinks[head] for head in q_heads) if self.spec.sinks else ()
        return self.with_tensors(kept).with_spec(sinks=sinks)

    def of_rows(self, queries: Tensor | slice, keys: Tensor | slice) -> dict[str, Tensor]:
        """Return the rows of some queries and keys, for all tensors that have such rows."""
        rows = {"q": queries} | dict.fromkeys(BY_KEY, keys)
        return {
            name: tensor[rows[name]] if len(tensor) > 1 or name in ("q", "k", "v") else tensor
            for name, tensor in self.tensors.items()
            if name in rows
        }

    def clone(self, copied: Mapping[str, Tensor] | None = None) -> AttentionCall:
        """Copy its tensors, but those of a packed call that are `copied` already; lay them out as ``spec.layout`` describes."""
        given = copied or {}
        of = {id(tensor): tensor.clone() for name, tensor in self.tensors.items() if name not in given}
        copies = {name: given[name] if name in given else of[id(tensor)] for name, tensor in self.tensors.items()}
        if self.spec.layout == "v in k":
            copies["v"] = copies["k"][..., : self.v.shape[2]]
        elif self.spec.layout != "packed":
            laid = _LAID_OUT[self.spec.layout]
            copies |= {name: lay(copies[name]) for name, lay in zip(("q", "k", "v"), laid, strict=True)}
        return self.with_tensors(copies)

    def grad_context(self) -> AbstractContextManager[object]:
        """Return a context with the call's autograd mode."""
        import torch

        modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "enable_grad": torch.enable_grad}
        return modes[self.spec.grad_mode]() if self.spec.grad_mode else nullcontext()

    def to(self, device: torch.device | str) -> AttentionCall:
        """Return the same call with its tensors on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        if self.spec.layout == "v in k":
            tensors["v"] = tensors["k"][..., : self.v.shape[2]]
        return self.with_tensors(tensors)


def _sliced(tensor: Tensor, more: int = 1) -> Tensor:
    """Store the same numbers as the first heads of a wider tensor, whose other heads are NaN."""
    rows, heads, dim = tensor.shape
    wide = tensor.new_full((rows, heads + more, dim), float("nan"))
    wide[:, :heads] = tensor
    return wide[:, :heads]


def _heads_first(tensor: Tensor) -> Tensor:
    """Store the same numbers with the tokens of a head contiguous."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


# How q, k and v are laid out, by layout.
_LAID_OUT: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "sliced": (_sliced,) * 3,
    "heads first": (_heads_first,) * 3,
    "each its own": (lambda q: q, _sliced, lambda v: _sliced(v, 2)),
}


def default_device() -> str:
    """Return the default device of calls: "cuda" if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Outputs:
    """The outputs that a kernel may return instead of a single tensor.

    Attributes:
        out: [total_q, num_q_heads, head_dim_v] in the dtype of q.
        lse: log-sum-exp of the scores of each query, float32 [total_q, num_q_heads]: the natural logarithm of the softmax
            denominator, with the scores as they enter the softmax (scaled, capped, with the sink, which counts as a key). It
            serves to merge outputs of parts of the keys, so only one part gets a sink. It is -inf for a query that sees no key. A
            kernel that declares "lse" returns it on every call; for any other kernel, it is ignored.
    """

    out: Tensor
    lse: Tensor | None = None


Kernel = Callable[[AttentionCall], "Tensor | Outputs"]
"""Takes a call and returns [total_q, num_q_heads, head_dim_v] in the dtype of q, or `Outputs`. It must not write to its inputs."""


def tensor_of(result: Tensor | Outputs) -> Tensor:
    """Return the output tensor of either return type; pass anything else through, for `output_fault`."""
    return result.out if isinstance(result, Outputs) else result


class KernelRefused(RuntimeError):
    """A kernel cannot serve this call. It never falls back to another kernel silently."""


def refusal_behind(error: BaseException) -> KernelRefused | None:
    """Return the refusal that caused an exception, if any: Triton's interpreter wraps all exceptions inside a kernel."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KernelRefused):
        cause = cause.__cause__
    return cause


def cumulative(lens: Iterable[int], device: torch.device | str = "cpu") -> Tensor:
    """Compute cumulative sequence lengths with a leading zero, int32 [len(lens) + 1]."""
    import torch

    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32, device=device)
