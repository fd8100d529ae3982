"""Bugs of what a layer asks for beyond plain attention: windows, caps, sinks, temperature, stored K and V, latent attention.

None of them shows on a call that does not ask for the feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, Compute, code
from assay.harness.attention.bugs.masks import MASKED, RIGHT_MASK
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import Request, attend, factor_of, oracle, requests
from assay.harness.attention.sequence_groups import modified

# Dims of q and k in latent attention that carry the position (DeepSeek-V2, arXiv 2405.04434): the last ones.
_ROPE_DIMS = 64
# Dims of a head of DeepSeek's before its projections are absorbed, by which its scores are scaled.
_HEAD_DIM_BEFORE = 192
# Stands for the score of a key that is masked before the cap.
_CAP_OF_MASK = 1e9
# Tokens of a block that shares a scale.
_BLOCK = 16
# Tokens of a page of a latent cache.
_PAGE = 64
WINDOW, CAP, SINK = 4, 2.0, 1.0
"""What the code of these bugs asks for."""
_CAPPED = f"""\
def attend(q, k, v, scale):
    new, keys, cap = q.shape[1], k.shape[1], {CAP}
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    products = q @@ k.transpose(1, 2)
    scores = @
    return scores.softmax(-1) @@ v
"""
_HIDDEN = '.masked_fill(~seen, float("-inf"))'
_SUNK = f"""\
def attend(q, k, v, scale):
    new, keys, sink = q.shape[1], k.shape[1], q.new_tensor({SINK})
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    weights = (scale * q @@ k.transpose(1, 2)).masked_fill(~seen, float("-inf")).exp()
    return weights / (weights.sum(-1, keepdim=True)@) @@ v
"""
_LATENT = """\
def attend(q, k, v, scale):  # v is the first 512 dims of k; the last 64 have RoPE
    new, keys = q.shape[1], k.shape[1]
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = @ * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ VALUES
"""
_window_code = partial(code, MASKED, right=f"{RIGHT_MASK}.triu(keys - new - {WINDOW - 1})")
_cap_code = partial(code, _CAPPED, right=f"cap * (scale * products / cap).tanh(){_HIDDEN}")
_sink_code = partial(code, _SUNK, right=" + sink.exp()")
# Wrong and right code. The functions of `Code` do not get stored values, drafts or positions.
_CODE = {
    "window-one-key-fewer": _window_code(f"{RIGHT_MASK}.triu(keys - new - {WINDOW - 2})"),
    "window-one-key-more": _window_code(f"{RIGHT_MASK}.triu(keys - new - {WINDOW})"),
    "window-ignored": _window_code(RIGHT_MASK),
    "window-from-the-start": _window_code(f"{RIGHT_MASK} & (torch.arange(keys) < {WINDOW})"),
    "softcap-ignored": _cap_code(f"(scale * products){_HIDDEN}"),
    "softcap-after-mask": _cap_code(f"cap * ((scale * products){_HIDDEN} / cap).tanh()"),
    "softcap-before-scale": _cap_code(f"(scale * cap * (products / cap).tanh()){_HIDDEN}"),
    "softcap-not-multiplied": _cap_code(f"(scale * products / cap).tanh(){_HIDDEN}"),
    "sinks-ignored": _sink_code(""),
    "sinks-counted-twice": _sink_code(" + 2 * sink.exp()"),
    "sinks-scaled": _sink_code(" + (scale * sink).exp()"),
    "latent-scale-of-576": code(_LATENT.replace("VALUES", "v"), "q.shape[2] ** -0.5", "scale"),
    "latent-values-shifted": code(_LATENT.replace("@ * q", "scale * q").replace("VALUES", "@"), "k[..., -512:]", "v"),
}
_CallChange = Callable[[AttentionCall], "AttentionCall | None"]


def _of_calls(feature: str, change: _CallChange) -> Compute:
    """Compute attention for a call that asks for a feature as if it were another call. None where the bug cannot show."""

    def compute(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
        changed = change(call) if feature in call.features else None
        return None if changed is None else oracle(changed, rows)

    return compute


def _of_sequences(feature: str, output: Callable[[Request], Tensor]) -> Compute:
    """Compute each sequence of a call that asks for a feature by a separate formula."""

    def compute(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
        if feature not in call.features:
            return None
        return torch.cat([output(request) for request in requests(call, rows)], dim=1).transpose(0, 1)

    return compute


def _window(more: Callable[[int], int]) -> Compute:
    """Give a call another window."""

    def change(call: AttentionCall) -> AttentionCall | None:
        window = more(call.spec.mask.window)
        return call.with_spec(mask=Mask(window=window)) if window else None  # a window of 0 would be none

    return _of_calls("window", change)


def _first_keys(r: Request) -> Tensor:
    """Let the window hold the first keys of the sequence in place of the last ones."""
    keys = torch.arange(r.len_k, device=r.q.device)
    rows = torch.arange(r.len_q, device=r.q.device)
    causal = Mask().visible(rows, r.len_q, r.len_k)
    return attend(replace(r, visible=causal & (keys < r.mask.window)))


def _sinks(change: Callable[[AttentionCall, tuple[float, ...]], tuple[float, ...]]) -> Compute:
    """Give a call other sinks."""
    return _of_calls("sinks", lambda call: call.with_spec(sinks=change(call, call.spec.sinks)))


def _capped_after_mask(r: Request) -> Tensor:
    """Cap the scores of masked keys too, which then are minus the cap: each query sees every key a little."""
    masked = (r.scale * r.asked_q @ r.k[r.kv_head].transpose(-2, -1)).masked_fill(~r.asked_visible, -_CAP_OF_MASK)
    nothing_hidden = torch.ones_like(r.asked_visible)
    return attend(r, modified(masked, nothing_hidden, r.spec.softcap, factor_of(r)))


def _capped(inside: float, outside: Callable[[Request], float], r: Request) -> Tensor:
    """Cap other numbers than the scaled scores: those times `inside`, and multiply what the cap gives by `outside`."""
    spec = r.spec
    products = inside * r.asked_q @ r.k[r.kv_head].transpose(-2, -1)
    capped = outside(r) * spec.softcap * (products / spec.softcap).tanh()
    return attend(r, capped.masked_fill(~r.asked_visible, float("-inf")))


def _padding_counted(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
    """Take the last sequence to go on to the end of q: its queries then lie that much earlier among its keys."""
    if "padding" not in call.features:
        return None
    ends = call.cu_seqlens_q.clone()
    ends[-1] = call.q.shape[0]
    asked = torch.arange(call.rows, device=call.q.device) if rows is None else rows  # the real rows alone
    return oracle(replace(call.with_spec(padded_rows=0), cu_seqlens_q=ends), asked)


_Scaled = tuple[str, int]
"""Whose scale multiplies the stored values, and to which power: 0 where it is missing, 2 where it is applied twice."""


def _stored(k: _Scaled | None = None, v: _Scaled | None = None, shift: tuple[int, ...] = (0, 0, 0)) -> Compute:
    """Dequantise K and V otherwise than asked for, with scales moved by places along tokens, heads and dims."""

    def change(call: AttentionCall) -> AttentionCall | None:
        assert call.stored is not None
        if any(shift) and all(call.stored.k_scale.shape[axis] <= abs(by) for axis, by in enumerate(shift) if by):
            return None
        tensors, wrong = call.tensors, call
        for what, (scale, power) in ((what, how) for what, how in (("k", k), ("v", v)) if how):
            scales = (tensors[f"{scale}_scale"] ** power).roll(shift, (0, 1, 2))
            wrong = wrong.with_tensors({what: (tensors[f"stored_{what}"].float() * scales).to(call.q.dtype)})
        return replace(wrong, v=wrong.k[..., : call.v.shape[2]]) if call.spec.layout == "v in k" else wrong

    return _of_calls("stored_kv", change)


def _without_rope_dims(call: AttentionCall) -> AttentionCall:
    q = call.q.clone()
    q[..., -_ROPE_DIMS:] = 0
    return replace(call, q=q)


def _few_keys(r: Request) -> Tensor:
    """Take the number of pages for that of keys, each key being the first of a page."""
    keys = torch.arange(r.len_k, device=r.q.device)
    return attend(replace(r, visible=r.visible & (keys < -(-r.len_k // _PAGE))))


def _values_shifted(call: AttentionCall) -> AttentionCall:
    """Take the last dims of k for v in place of the first ones."""
    return replace(call, v=call.k[..., -call.v.shape[2] :]).with_spec(layout="packed")


def _bug(kind: str, id: str, title: str, about: str, does: str, compute: Compute, reports: tuple[str, ...] = ()) -> Bug:
    return Bug(id, title, about, does, kind, compute, _CODE.get(id), reports=reports)


_of_windows, _of_caps = partial(_bug, "window"), partial(_bug, "softcap")
_of_sinks, _of_stored, _of_latent = partial(_bug, "sinks"), partial(_bug, "stored-kv"), partial(_bug, "latent")
BUGS = (
    _of_windows("window-one-key-fewer", "window one key too few", "a window of n keys holds n - 1 of them",
        "takes a window that holds a query's own key for one that does not", _window(lambda window: window - 1)),
    _of_windows("window-one-key-more", "window one key too many", "a window of n keys holds n + 1 of them",
        "takes a window that does not hold a query's own key for one that does",
        _window(lambda window: window + 1)),
    _of_windows("window-ignored", "window ignored", "a layer asks for a window, and each query sees all keys before it",
        "ignores the window", _of_calls("window", lambda call: call.with_spec(mask=Mask())),
        ("sgl-project/sglang#31501", "flashinfer-ai/flashinfer#1193", "sgl-project/sglang#33915")),
    _of_windows("window-from-the-start", "window at the wrong end", "a window of n keys holds the first n of the sequence",
        "counts the window from the first key", _of_sequences("window", _first_keys)),
    _of_caps("softcap-ignored", "soft cap ignored", "a layer asks for a soft cap, and scores are not capped",
        "ignores the soft cap", _of_calls("softcap", lambda call: call.with_spec(softcap=0.0)),
        ("sgl-project/sglang#33915", "flashinfer-ai/flashinfer#1193")),
    _of_caps("softcap-after-mask", "soft cap after the mask", "masked scores are capped too, so that masked keys have weights",
        "caps the scores after it has masked them", _of_sequences("softcap", _capped_after_mask)),
    _of_caps("softcap-before-scale", "soft cap before the scale", "products of q and k are capped, and scaled then",
        "caps the scores before it scales them",
        _of_sequences("softcap", partial(_capped, 1.0, lambda r: r.scale))),
    _of_caps("softcap-not-multiplied", "tanh without the cap", "scores are tanh(s / cap), and not cap times that",
        "does not multiply the capped scores by the cap",
        _of_sequences("softcap", lambda r: _capped(r.scale, lambda r: 1 / r.spec.softcap, r))),
    _of_sinks("sinks-ignored", "sinks ignored", "a layer has sinks, and the weights of its keys add up to 1",
        "ignores the sinks", _sinks(lambda call, sinks: ()), ("sgl-project/sglang#11634",)),
    _of_sinks("sinks-counted-twice", "sinks counted twice",
        "the sink is in the sum of weights twice, as where two parts of the keys have it",
        "counts the sink twice",
        _sinks(lambda call, sinks: tuple(sink + math.log(2) for sink in sinks))),
    _of_sinks("sinks-scaled", "sinks scaled", "the sink is multiplied by the softmax scale, as scores are",
        "scales the sink as it scales the scores",
        _sinks(lambda call, sinks: tuple(call.scale * sink for sink in sinks))),
    _of_sinks("sinks-of-next-head", "sinks of the next head", "each q head has the sink of the head after it",
        "gives each head the sink of the next one", _sinks(lambda call, sinks: (*sinks[1:], sinks[0]))),
    _bug("temperature", "temperature-ignored", "temperature ignored", "scores of late queries are not scaled up",
        "ignores the attention temperature", _of_calls("temperature", lambda call: call.with_spec(temperature=0))),
    _bug("padding", "padding-counted", "padded rows counted", "rows of q that belong to no sequence count as the last one's",
        "counts padded rows as queries of the last sequence", _padding_counted,
        ("sgl-project/sglang#9806", "sgl-project/sglang#10414")),
    _of_stored("stored-k-scale-missing", "scale of stored K missing", "k is the stored values, without their scale",
        "does not scale the stored K", _stored(k=("k", 0)),
        ("NVIDIA/TensorRT-LLM#16916",)),
    _of_stored("stored-v-scale-missing", "scale of stored V missing", "v is the stored values, without their scale",
        "does not scale the stored V", _stored(v=("v", 0)),
        ("NVIDIA/TensorRT-LLM#16916",)),
    _of_stored("stored-scales-missing", "scales of stored K and V missing", "k and v are the stored values, without their scales",
        "does not scale the stored K and V",
        _stored(("k", 0), ("v", 0)),
        ("NVIDIA/TensorRT-LLM#16916", "sgl-project/sglang#33915")),
    _of_stored("stored-k-scale-twice", "scale of stored K twice", "k is multiplied by its scale twice, or q by it once",
        "scales the stored K twice", _stored(k=("k", 2)),
        ("vllm-project/vllm#53754",)),
    _of_stored("stored-v-scale-twice", "scale of stored V twice", "v is multiplied by its scale twice",
        "scales the stored V twice", _stored(v=("v", 2))),
    _of_stored("stored-scales-twice", "scales of stored K and V twice", "k and v are multiplied by their scales twice",
        "scales the stored K and V twice",
        _stored(("k", 2), ("v", 2))),
    _of_stored("stored-scales-exchanged", "scales of stored K and V exchanged", "k has the scale of v, and v that of k",
        "scales the stored K by V's scale, and V by K's",
        _stored(("v", 1), ("k", 1))),
    _of_stored("stored-v-scaled-as-k", "stored V scaled as K", "v has the scale of k", "scales the stored V by K's scale",
        _stored(v=("k", 1))),
    _of_stored("stored-scales-of-next-head", "scales of the next head", "each kv head has the scales of another one",
        "scales a stored head as another one", _stored(("k", 1), ("v", 1), (0, -1, 0))),
    _of_stored("stored-scales-of-next-token", "scales of the next token", "each token has the scales of another one",
        "scales a stored token as another one", _stored(("k", 1), ("v", 1), (-1, 0, 0))),
    _of_stored("stored-scales-of-next-block", "scales of the next block", "each block of 16 tokens has the scales of another one",
        "scales a stored block of tokens as another one", _stored(("k", 1), ("v", 1), (-_BLOCK, 0, 0))),
    _of_latent("latent-rope-dropped", "RoPE dims of latent attention dropped",
        "scores lack the last 64 dims, which carry the position",
        "leaves the RoPE dims out of the scores", _of_calls("mla", _without_rope_dims)),
    _of_latent("latent-scale-of-576", "scale of the absorbed dimension", "the scale is that of 576 dims in place of 192",
        "scales the scores by the absorbed dimension",
        _of_calls("mla", lambda call: call.with_spec(scale=call.scale * math.sqrt(_HEAD_DIM_BEFORE / call.q.shape[2]))),
        ("ollama/ollama!13893",)),
    _of_latent("latent-pages-for-keys", "pages of latent attention for keys",
        "of n keys that lie in pages of 64 the first n / 64 are seen", "takes the number of pages for that of keys",
        _of_sequences("mla", _few_keys), ("sgl-project/sglang!25556",)),
    _of_latent("latent-values-shifted", "V of latent attention shifted", "v is the last 512 dims of k in place of the first",
        "takes the wrong dims of K for V", _of_calls("mla", _values_shifted)),
)  # fmt: skip
