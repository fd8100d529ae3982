"""Stand-ins for SGLang's objects, small enough for the oracle; a fixture, because test folders are not packages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import CallSpec
from assay.harness.engines.inside.attachment import Attachment
from assay.harness.engines.inside.candidates import Candidate
from assay.harness.engines.inside.faults import Faults, FaultyCandidate
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.inside.tracer import Tracer, decoder_layers
from assay.harness.engines.sglang.attach import _observe
from assay.harness.engines.sglang.kv_pool import Pages
from assay.harness.evidence.faults import SENSITIVITY

HEADS, KV_HEADS, DIM, LAYERS, SLOTS = 4, 2, 8, 3, 256


class Pool:
    """Stand-in for SGLang's KV pool."""

    def __init__(self) -> None:
        self.keys = [torch.zeros(SLOTS, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.values = [torch.zeros(SLOTS, KV_HEADS, DIM) for _ in range(LAYERS)]

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.values[layer]


class Backend:
    """Stand-in for an SGLang backend: writes K and V if asked to, and computes plain attention with the oracle."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.pages, self.prepared = runner, Pages(runner), 0

    def init_forward_metadata(self, batch: Any) -> None:
        self.prepared += 1

    def _run(self, phase: str, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool) -> Tensor:
        if save:
            self.runner.token_to_kv_pool.keys[layer.layer_id][batch.out_cache_loc] = k
            self.runner.token_to_kv_pool.values[layer.layer_id][batch.out_cache_loc] = v
        spec = CallSpec(layer.scaling, layer=layer.layer_id, phase=phase)  # type: ignore[arg-type]
        call = self.pages.packed_call(spec, q, layer, batch, batch.new, batch.prefix)
        return rounded_oracle(call).reshape(q.shape[0], -1)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Tensor:
        return self._run("extend", q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Tensor:
        return self._run("decode", q, k, v, layer, forward_batch, save_kv_cache)


def layer_of(index: int, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "layer_id": index, "tp_q_head_num": HEADS, "qk_head_dim": DIM, "scaling": DIM**-0.5, "sliding_window_size": -1,
        "logit_cap": 0.0, "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"),
        "use_irope": False, "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


class Layer(torch.nn.Module):
    """Stand-in for a decoder layer: returns twice the output of attention, and the output as the residual that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Identity()
        self.self_attn.tp_q_head_num = HEADS  # type: ignore[assignment]

    def forward(self, attend: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        out = attend()
        return 2 * out, out


class Server:
    """Stand-in for a scheduler: requests of 16 slots each, and forward passes through all layers."""

    def __init__(self, seed: int = 0) -> None:
        table = torch.arange(SLOTS).reshape(4, 64)
        self.runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=Pool(), device="cpu")
        self.runner.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Layer() for _ in range(LAYERS))})
        self.backend = Backend(self.runner)
        self.generator = torch.Generator().manual_seed(seed)

    def step(
        self, phase: str, lens: list[tuple[int, int]], rids: list[str] | None = None, mode: str = "EXTEND",
        arguments: dict[str, Any] | None = None, **layer: Any,
    ) -> list[Tensor]:  # fmt: skip
        """One forward pass over sequences of (new tokens, cached prefix); the output of each layer. Keeps its batch.

        Args:
            phase: "extend" or "decode".
            lens: the sequences.
            rids: request ids.
            mode: SGLang's forward mode.
            arguments: further keyword arguments of each call.
            layer: attributes of each layer.
        """
        new, prefix = [n for n, _ in lens], [p for _, p in lens]
        slots = torch.cat([torch.arange(p, p + n) + 64 * i for i, (n, p) in enumerate(lens)])
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode), extend_seq_lens_cpu=new, extend_prefix_lens_cpu=prefix,
            seq_lens=torch.tensor([n + p for n, p in lens]), req_pool_indices=torch.arange(len(lens)),
            out_cache_loc=slots, rids=[f"r{i}" for i in range(len(lens))] if rids is None else rids, new=new, prefix=prefix,
            input_ids=torch.cat([torch.arange(p, p + n) + 1000 * (i + 1) for i, (n, p) in enumerate(lens)]),
        )  # fmt: skip
        self.batch = batch
        outs = []
        for index in range(LAYERS):
            q, k, v = (torch.randn(sum(new), heads, DIM, generator=self.generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
            forward = getattr(self.backend, f"forward_{phase}")
            given = (q.reshape(sum(new), -1), k, v, layer_of(index, **layer), batch)
            outs.append(self.runner.model["layers"][index](partial(forward, *given, **arguments or {}))[1])
        return outs


def attach(
    server: Server, folder: Path, candidate: Candidate | None = None, shadow: Shadow | None = None,
    trace_bytes: int = 10**6, rank: int = 0, ranks: int = 1,
) -> None:  # fmt: skip
    """Attach to a server's backend as the plugin does."""
    shadow = shadow or Shadow(folder, candidate, None)
    tracer = Tracer(folder, trace_bytes, rank, ranks)
    faults = Faults(folder)
    faulty = FaultyCandidate(candidate, faults) if candidate else None
    behind = Shadow(folder / SENSITIVITY, faulty, None)
    attachment = Attachment(folder, shadow, candidate, tracer, faults, behind)
    attachment.watch(decoder_layers(server.runner.model, lambda module: hasattr(module, "tp_q_head_num")))
    _observe(server.backend, "mine", attachment, Pages(server.runner))
