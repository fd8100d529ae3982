"""A model as transformers computes it: eager attention, one sequence at a time, with the keys and values of the last one kept.

It shares no code with the engines that assay compares, but their checkpoint. It is no oracle: five of 88 failures that were read
came from transformers itself, so whoever believes it also reads `contradictions`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.evals.probe_texts import CHATS, TEXTS
from assay.harness.engines.inside.tracer import decoder_layers
from assay.harness.evidence.fingerprint import Fingerprint, RopeTable, Tokens, Weight
from assay.harness.evidence.trace import LAYER_OUTPUT, NEW, OUTPUT, QUERY, READ
from assay.harness.fingerprint.folder_readings import tokens_of
from assay.harness.fingerprint.in_model import ropes_of
from assay.harness.fingerprint.parts import faults
from assay.harness.fingerprint.weights import weights_of


class Model:
    """A loaded model.

    Attributes:
        folder: its files.
        network: the module.
        ends: ids of the tokens that end an answer.
        kept: the sequence whose keys and values are kept, or nothing.
    """

    def __init__(self, folder: Path, dtype: str = "float32", device: str = "cpu", *, trusted: bool = False) -> None:
        """Load a model; `trusted` allows its folder's own code. Raises whatever transformers raises."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.folder, self.kept, self._trusted = folder, tuple[int, ...](), trusted
        loaded, about = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True, trust_remote_code=trusted,
            output_loading_info=True,
        )  # fmt: skip
        self.network = loaded.to(device).eval()
        self._unloaded = {*about["missing_keys"], *(key for key, *_ in about["mismatched_keys"])}
        self._past: Any = None

    def forget(self) -> None:
        """Drop the keys and values that are kept."""
        self.kept, self._past = (), None

    def reusable(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens of a sequence whose keys and values are kept."""
        both = zip(ids, self.kept, strict=False)
        return next((n for n, (own, kept) in enumerate(both) if own != kept), min(len(ids), len(self.kept)))

    def log_probabilities(self, ids: Sequence[int], reuse: int = 0) -> tuple[Tensor, int]:
        """Compute the log-probabilities after each token of a sequence that is computed, in nats, and keep its keys and values.

        Args:
            ids: the sequence.
            reuse: the most tokens whose keys and values may be those that are kept; the last token is always computed.

        Returns:
            The log-probabilities of the next token, float64 [len(ids) - reused, vocabulary], and the number of tokens reused.
        """
        from transformers import DynamicCache

        reused = self.reusable(ids[: min(reuse, len(ids) - 1)])
        if not reused:
            self.forget()
        # Made without a configuration, it keeps all tokens of layers with a window too, so that it can be cut anywhere. A recurrent
        # state cannot, so nothing is kept of it.
        past = None if self.network._is_stateful else self._past or DynamicCache()
        if past is not None and (more := past.get_seq_length() - reused) > 0:
            past.crop(-more)
        with torch.inference_mode():
            given = torch.tensor([list(ids[reused:])], device=self.network.device)
            out = self.network(given, past_key_values=past, use_cache=past is not None)
        self.kept, self._past = () if past is None else tuple(ids), past
        return torch.log_softmax(out.logits[0].double(), -1), reused

    def trace(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Compute a sequence alone, and return what each layer's attention reads and returns, and what the layer returns.

        Names are those of `assay.harness.evidence.trace`.

        Returns:
            q and outputs, [tokens, q heads, head_dim], K and V, [tokens, kv heads, head_dim], and outputs of layers, [tokens, 1,
            hidden size]. A layer that calls no function ``eager_attention_forward`` of its module has the last alone.
        """
        kept: dict[str, Tensor] = {}
        names = {type(module).__module__ for module in self.network.modules() if hasattr(module, "layer_idx")}
        eager = "eager_attention_forward"
        plain = {
            sys.modules[name]: vars(sys.modules[name])[eager] for name in names if hasattr(sys.modules[name], eager)
        }

        def watched(compute: Any) -> Any:
            def attention(layer: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Any:
                made = compute(layer, q, k, v, *arguments, **named)
                tensors = (q, k, v, k, v, made[0].transpose(1, 2))  # [1, heads, tokens, dims]
                for name, tensor in zip((QUERY, *NEW, *READ, OUTPUT), tensors, strict=True):
                    kept[f"{name}{layer.layer_idx}"] = tensor[0].transpose(0, 1)
                return made

            return attention

        def returned(number: int, layer: Any, given: Any, out: Any) -> None:
            kept[f"{LAYER_OUTPUT}{number}"] = (out[0] if isinstance(out, tuple) else out)[0][:, None]

        self.forget()
        layers = decoder_layers(self.network, lambda module: hasattr(module, "layer_idx"))
        hooks = [layer.register_forward_hook(partial(returned, number)) for number, layer in layers.items()]
        try:
            for module, compute in plain.items():
                vars(module)[eager] = watched(compute)
            self.log_probabilities(ids)
        finally:
            for hook in hooks:
                hook.remove()
            for module, compute in plain.items():
                vars(module)[eager] = compute
        return kept

    def generate(self, ids: Sequence[int], most: int, ends: Collection[int] = ()) -> Iterator[tuple[int, Tensor]]:
        """Yield the tokens of the greedy answer to a prompt, with the log-probabilities, float64 [vocabulary], of each.

        Args:
            most: number of tokens, unless one of `ends` comes first, which is yielded too.
        """
        told = tuple(ids)
        for _ in range(most):
            last = self.log_probabilities(told, len(told) - 1)[0][-1]
            told = (*told, int(last.argmax()))
            yield told[-1], last
            if told[-1] in ends:
                return

    def tokenizer(self) -> Any:
        """Load the tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=self._trusted)

    def tokens(self) -> Tokens:
        """Make the ids of the corpus."""
        return Tokens(**tokens_of(self.tokenizer(), TEXTS, CHATS, str(self.folder)))

    def ropes(self) -> tuple[RopeTable, ...]:
        """Read the frequencies of its rotary embeddings, judged by ``config.json`` as computed in float64 without transformers."""
        return ropes_of(self.network, json.loads((self.folder / "config.json").read_text()))

    def weights(self) -> tuple[Weight, ...]:
        """Describe the parameters; those that transformers made up, as the checkpoint lacks them, are marked."""
        made = weights_of(self.network)
        return tuple(each.model_copy(update={"not_in_checkpoint": each.name in self._unloaded}) for each in made)

    def contradictions(self) -> list[str]:
        """List how it contradicts its folder: RoPE, token ids and parameters without a value in the checkpoint."""
        with torch.inference_mode():
            parts = {"tokens": self.tokens(), "rope": self.ropes(), "weights": self.weights()}
        seen = Fingerprint(source="server", engine="", model=str(self.folder), **parts)
        return [fault.says for fault in faults(seen) if fault.outputs]
