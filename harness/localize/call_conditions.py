"""Describes a call in one line."""

from __future__ import annotations

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.forms import form_of


def describe(call: AttentionCall) -> str:
    """Describe a call: "layer 2 extend, new+prefix 20+77 3+0, 4 q heads on 2 kv heads, head_dim 64, bfloat16, window 17"."""
    counts = (("q head", call.q.shape[1]), ("kv head", call.k.shape[1]))
    heads = [f"{count} {what}{'s' * (count != 1)}" for what, count in counts]
    lens = " ".join(f"{new}+{prefix}" for new, prefix in zip(call.lens_q, call.prefixes, strict=True))
    values = f", head_dim_v {call.v.shape[2]}" if call.v.shape[2] != call.q.shape[2] else ""
    sliced, mode = call.spec.layout == "sliced", f", under {call.spec.grad_mode}" if call.spec.grad_mode else ""
    return (
        f"layer {call.layer} {call.phase}, new+prefix {lens}, {heads[0]} on {heads[1]}, "
        f"head_dim {call.q.shape[2]}{values}, {str(call.q.dtype).removeprefix('torch.')}{', sliced inputs' * sliced}{mode}"
        f"{''.join(f', {words}' for words in _asked(call))}"
    )


def _asked(call: AttentionCall) -> list[str]:
    """List the features that a call asks for beyond plain attention, and how it is called."""
    spec = call.spec
    asked = {
        f"window {spec.mask.window}": spec.mask.window, f"softcap {spec.softcap:g}": spec.softcap,
        f"temperature {spec.temperature}": spec.temperature, "sinks": spec.sinks,
        f"{spec.padded_rows} padded rows": spec.padded_rows, "not causal": not call.causal,
    }  # fmt: skip
    stored = [f"K and V in {form_of(call)}"] if call.stored is not None else []
    return [*(words for words, value in asked.items() if value), *stored, *spec.ways]
