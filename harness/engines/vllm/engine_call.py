"""vLLM's attention calls, for everything that is attached to the server.

vLLM computes all sequences of a pass in one call of each layer: whole prompts, chunks and decode steps, in the order of their batch
slots. Such a call is split into its sequences in decode and the others, so that each part has one phase of the contract.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, Mask, cumulative
from assay.harness.engines.inside.observed_call import ForwardPass, Phase
from assay.harness.engines.vllm.kv_pages import Pages

_PATH = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_number(layer: Any) -> int:
    """Return the number of the decoder layer that an attention module of vLLM is in.

    Raises:
        KernelRefused: its path has no number.
    """
    numbers = _PATH.findall(layer.layer_name)
    if not numbers:
        raise KernelRefused(f"the attention {layer.layer_name!r} is in no numbered layer")
    return int(numbers[-1])


@dataclass(frozen=True)
class Part:
    """The sequences of a pass that are in one phase.

    Attributes:
        phase: "extend" or "decode".
        slots: index of each sequence in the pass.
        new: new tokens of each.
        prefix: computed tokens of each before the pass: an earlier chunk, the prefix cache, or earlier steps.
        requests: vLLM's request id of each.
        rows: the rows of the sequences among those of the pass: a slice if it has no others, else int64 [rows].
    """

    phase: Phase
    slots: tuple[int, ...]
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    requests: tuple[str, ...]
    rows: slice | Tensor


def parts_of(
    requests: Sequence[str], new: Sequence[int], prefix: Sequence[int], prompt: Sequence[int]
) -> tuple[Part, ...]:
    """Split a pass by phase: the sequences in extend, and those in decode. A phase without sequences is left out.

    A sequence is in decode if one token is computed that is not part of its prompt. A request that was preempted computes its
    prompt and its answer again, and a step that verifies drafts has several new tokens: both are in extend.

    Args:
        requests: request id of each sequence.
        new: new tokens of each.
        prefix: tokens of each that were computed before.
        prompt: tokens of each prompt.
    """
    decodes = [n == 1 and p >= length for n, p, length in zip(new, prefix, prompt, strict=True)]
    starts = [0, *accumulate(new)]
    parts = []
    phase: Phase
    for phase, wanted in (("extend", False), ("decode", True)):
        slots = tuple(slot for slot, decode in enumerate(decodes) if decode is wanted)
        if not slots:
            continue
        whole = len(slots) == len(new)
        rows = slice(0, starts[-1]) if whole else torch.cat([torch.arange(*starts[slot : slot + 2]) for slot in slots])
        of_new, of_prefix = (tuple(values[slot] for slot in slots) for values in (new, prefix))
        parts.append(Part(phase, slots, of_new, of_prefix, tuple(requests[slot] for slot in slots), rows))
    return tuple(parts)


class ServedPass:
    """A pass of a model runner that serves requests. Its layers share it.

    Args:
        runner: vLLM's GPUModelRunner (V1), also on a CPU.
        scheduled: what its ``execute_model`` was given.
    """

    def __init__(self, runner: Any, scheduled: Any) -> None:
        self._runner, self._scheduled = runner, scheduled

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The pass by phase. To be read in a call of attention: the runner has put its requests into slots by then."""
        batch, counts = self._runner.input_batch, self._scheduled.num_scheduled_tokens
        ids = tuple(batch.req_ids[: batch.num_reqs])
        prefix, prompt = (
            values[: len(ids)].tolist() for values in (batch.num_computed_tokens_cpu, batch.num_prompt_tokens)
        )
        return parts_of(ids, tuple(int(counts[name]) for name in ids), tuple(prefix), prompt)

    @cached_property
    def sequences(self) -> int:
        """Sequences of all phases."""
        return sum(len(part.slots) for part in self.parts)

    def between(self, first: int, stop: int, phase: Phase) -> Part:
        """Return the part of some neighbouring slots, in a phase that a backend chose for them."""
        slots = range(first, stop)
        of = {slot: (part, at) for part in self.parts for at, slot in enumerate(part.slots)}
        new, prefix, requests = (
            tuple(getattr(of[slot][0], name)[of[slot][1]] for slot in slots) for name in ("new", "prefix", "requests")
        )
        start = sum(n for part in self.parts for slot, n in zip(part.slots, part.new, strict=True) if slot < first)
        return Part(phase, tuple(slots), new, prefix, requests, slice(start, start + sum(new)))

    def tokens(self, part: Part) -> Tensor:
        """Return the ids of the new tokens of a part, [rows]."""
        ids = self._runner.input_ids.cpu
        return torch.as_tensor(ids)[part.rows].clone()


def kind_of(runner: Any, scheduled: Any) -> tuple[str, bool] | None:
    """Return the phase of a pass before it runs, and whether it has a cached prefix; "extend" if any sequence is in it.

    Args:
        runner: as in `ServedPass`.
        scheduled: as in `ServedPass`.

    Returns:
        Them, or None for a pass without tokens.
    """
    counts = scheduled.num_scheduled_tokens
    if not counts:
        return None
    new, running = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
    extends = [request.num_computed_tokens for request in new]
    for name, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
        if counts[name] > 1 or computed < runner.requests[name].num_prompt_tokens:
            extends.append(computed)
    return ("extend", any(extends)) if extends else ("decode", True)


@dataclass
class VLLMCall:
    """The sequences in one phase of an attention call, as vLLM makes it; see `ObservedCall`.

    Attributes:
        phase: "extend" or "decode".
        batch: the pass.
        part: its sequences.
        attention: vLLM's layer, with its implementation as ``impl``.
        q: [tokens, q heads, head_dim] of all sequences.
        k: [tokens, kv heads, head_dim] as the layer gave it, or None if the layer reads another layer's.
        v: as k.
        metadata: of all sequences, as the backend made it.
        cache: the layer's KV cache.
        recompute: computes the call again as vLLM's own backend does, [tokens, q heads, head_dim_v], the rows of `q`.
        is_last_part: whether no other part of the same call follows.
        forward_pass: the pass, once described.
    """

    phase: Phase
    batch: ServedPass
    part: Part
    attention: Any
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    metadata: Any
    cache: Tensor
    recompute: Callable[[], Tensor]
    is_last_part: bool = True
    forward_pass: ForwardPass = field(init=False)

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return layer_number(self.attention)

    @property
    def rows_of_batch(self) -> slice | Tensor:
        """The part's rows of the pass."""
        return self.part.rows

    @property
    def rows(self) -> slice | Tensor:
        """The part's rows of `q`."""
        return self.part.rows

    @property
    def is_served(self) -> bool:
        """True: a pass without requests has no calls of this kind."""
        return True

    @property
    def requests(self) -> Sequence[str]:
        """vLLM's ids of the requests."""
        return self.part.requests

    @property
    def heads(self) -> int:
        """Number of q heads that this process computes."""
        return int(self.q.shape[1])

    def describe_pass(self) -> ForwardPass:
        """Describe the pass."""
        part = self.part
        return ForwardPass(part.new, part.prefix, part.requests, self.batch.tokens(part))

    @property
    def pages(self) -> Pages:
        """The layer's pages. Raises KernelRefused if their layout is not known."""
        return Pages.of(self.attention, self.cache, self.q.dtype)

    def own(self) -> tuple[Tensor, Tensor] | None:
        """Return K and V of the new tokens as the layer gave them, or None if it reads another layer's."""
        shared = getattr(self.attention.impl, "kv_sharing_target_layer_name", None)
        if shared or self.k is None or self.v is None:
            return None
        return self.k[self.rows], self.v[self.rows]

    @property
    def given(self) -> tuple[Tensor, Tensor] | None:
        """Return the K and V of `own` if the pages store them in fewer bits, or None."""
        return self.own() if self.pages.stored else None

    def pack(self, who: str) -> AttentionCall:
        """Gather the tensors; K and V are in the pages. Raises KernelRefused for anything that the contract cannot express."""
        spec, part = spec_of(self.attention, self.metadata, self.phase, who), self.part
        if len(self.metadata.seq_lens) != self.batch.sequences:
            raise KernelRefused(
                f"layer {spec.layer} attends to parts of the sequences ({type(self.metadata).__name__}), which the kernel contract "
                f"does not express, so {who} cannot serve it"
            )
        q = self.q[self.rows]
        # Before the first key that a windowed layer sees, its block table names pages that now belong to others.
        first = [max(0, p + 1 - spec.mask.window) if spec.mask.window else 0 for p in part.prefix]
        lens_k = [p + n - skipped for p, n, skipped in zip(part.prefix, part.new, first, strict=True)]
        table = self.metadata.block_table[list(part.slots)]
        k, v, stored = self.pages.gathered(table, first, lens_k, q.dtype)
        return AttentionCall(q, k, v, cumulative(part.new, q.device), cumulative(lens_k, q.device), spec, stored)


def spec_of(layer: Any, metadata: Any, phase: Phase, who: str) -> CallSpec:
    """Read the request of a call of a vLLM layer, which `who` would have to compute.

    vLLM's layers have the configured window, the number of keys that a query sees; -1 or None means that there is none. Backends of
    FlashAttention's form have (window - 1, 0).

    Raises:
        KernelRefused: the contract does not express what the layer needs.
    """
    impl, number = layer.impl, layer_number(layer)
    kind = getattr(impl, "attn_type", "decoder")
    kind, window = getattr(kind, "value", kind), impl.sliding_window
    window = window[0] + 1 if isinstance(window, tuple) else -1 if window is None else window
    wants = {
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        f"{kind} attention": kind != "decoder",
        "non-causal attention": not getattr(metadata, "causal", True)
        or getattr(metadata, "dynamic_causal", None) is not None,
        "cascade attention": getattr(metadata, "use_cascade", False),
    }
    if any(wants.values()):
        what = " and ".join(feature for feature, wanted in wants.items() if wanted)
        raise KernelRefused(
            f"layer {number} needs {what}, which the kernel contract does not express, so {who} cannot serve it"
        )
    sinks = getattr(impl, "sinks", None)
    return CallSpec(
        float(impl.scale),
        mask=Mask(window=max(0, int(window))),
        layer=number,
        phase=phase,
        softcap=max(0.0, float(getattr(impl, "logits_soft_cap", None) or 0.0)),
        sinks=() if sinks is None else tuple(sinks.float().tolist()),
    )
