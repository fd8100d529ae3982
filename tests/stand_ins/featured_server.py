"""An SGLang server that starts at once: it computes log-probabilities from sums of tokens, and has features and bugs to order."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from assay.harness.engines.base import ChatRequest
from assay.harness.engines.inside.control import FORCED_REQUEST, Control, read_setting
from assay.harness.engines.sglang.beside_model import OTHER_ADAPTER
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.errors import EngineError
from assay.harness.evidence.counters import ADMISSIONS, Admission
from assay.harness.evidence.fingerprint import Fingerprint, Resolved
from assay.harness.evidence.records import Token
from assay.harness.evidence.run_file import RUN
from assay.harness.evidence.trace import TraceHeader, write_pass
from assay.harness.sides import flag_values

VOCABULARY = 97
LAYERS, SPOILED = 3, 1
"""Layers of the model, and that in whose attention a bug is."""


@dataclass(frozen=True)
class Served:
    """How one request is served: what a bug can depend on."""

    flags: Mapping[str, str]
    batch: int
    cached: int
    reloaded: bool
    streamed: bool


Bug = Callable[[Served], bool]


class FeaturedServer(SGLangServer):
    """A stand-in for a server. Class attributes are set by a test.

    Attributes:
        bug: whether a request gets wrong log-probabilities.
        refused: flags with which it does not start.
        started: flags of each server that was started.
    """

    bug: Bug = staticmethod(lambda served: False)
    refused: tuple[str, ...] = ()
    started: list[Mapping[str, str]]

    def start(self) -> None:
        self.flags = flag_values(self.launch.engine_args)
        if any(name in self.refused for name in self.flags):
            raise EngineError("the stand-in does not start with these flags")
        self.started.append(self.flags)
        self.lock, self.streams, self.done = threading.Lock(), list[Any](), 0
        self.startup_s, self.reloaded, self.cache = 1.0, False, list[tuple[int, ...]]()

    def stop(self) -> None:
        pass

    def last_step(self) -> str:
        return ""

    def arguments(self) -> dict[str, Any]:
        return {
            "model_path": str(self.launch.model),
            "attention_backend": self.launch.backend,
            "page_size": int(self.flags.get("--page-size", 1)),
            "tp_size": int(self.flags.get("--tp-size", 1)),
            "chunked_prefill_size": int(self.flags.get("--chunked-prefill-size", 4096)),
            "disable_overlap_schedule": "--disable-overlap-schedule" in self.flags,
            "enable_mixed_chunk": "--enable-mixed-chunk" in self.flags,
            "disable_radix_cache": "--disable-radix-cache" in self.flags,
            "enable_lora": "--enable-lora" in self.flags,
        }

    def fingerprint(self) -> Fingerprint:
        arguments = {name: str(value) for name, value in self.arguments().items()}
        runs = {"attention": self.launch.backend, "all-reduce": f"{arguments['tp_size']} ranks"}
        backends = tuple(Resolved(operation=operation, runs=name) for operation, name in runs.items())
        return Fingerprint(source="server", engine="a stand-in", model="", arguments=arguments, backends=backends)

    def flush_cache(self) -> None:
        self.cache.clear()

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/update_weights_from_disk":
            self.reloaded = True
            return {"success": True, "message": "loaded"}
        if "lora_adapter" in path:
            return {"success": True}
        starts = body.get("logprob_start_len") or [len(ids) - 1 for ids in body["input_ids"]]
        requests = list(zip(body["rid"], body["input_ids"], starts, body["sampling_params"], strict=True))
        self.scored = "return_logprob" in body
        self._admit(requests)
        return [self._answer(*request, len(requests), False) for request in requests]

    def client(self) -> Any:
        return SimpleNamespace(events=self._stream)

    def _stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        request = (body["rid"], body["input_ids"], body["logprob_start_len"], body["sampling_params"])
        with self.lock:
            self.scored = True
            self.streams.append(request)
        seen = 0
        while len(self.streams) > seen:  # as long as more come, they are a batch
            seen = len(self.streams)
            time.sleep(0.05)
        with self.lock:
            if request == self.streams[0]:
                self._admit(self.streams)
            whole = self._answer(*request, seen, True)
            self.done += 1
            if self.done == seen:
                self.done, self.streams = 0, []
        return [{}, whole]

    def ask(self, asks: Sequence[ChatRequest], concurrency: int, on_reply: Any, enough: Any = None) -> None:
        for number, request in enumerate(asks):
            token = Token(text=request.prompt[-3:], logprob=-0.1, top=())
            told = {"finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 1, "latency_s": 0.1}
            on_reply(number, request.answered("reference", token.text, tokens=(token,), **told))

    def _admit(self, requests: Sequence[tuple[str, list[int], int, Any]]) -> None:
        chunk = int(self.flags.get("--chunked-prefill-size", 1 << 30))
        lines = [[(rid, min(len(ids), chunk), 0) for rid, ids, _, _ in requests]]
        lines += [[(rid, len(ids) - chunk, chunk)] for rid, ids, _, _ in requests if len(ids) > chunk + 1]
        if "--enable-mixed-chunk" in self.flags and len(requests) > 1 and not self.scored:
            (first, ids, _, _), (second, *_) = requests[:2]
            lines.append([(first, 1, len(ids)), (second, 2, 0)])
        with (Path(self.launch.evidence) / ADMISSIONS).open("a") as file:
            for line in lines:
                rids, new, prefix = zip(*line, strict=True)
                file.write(Admission(process=1, rids=rids, new=new, prefix=prefix).model_dump_json() + "\n")

    def _answer(self, rid: str, ids: list[int], start: int, sampling: Any, batch: int, streamed: bool) -> Any:
        depth = sampling["max_new_tokens"]
        cached = self._cached(ids, start)
        served = Served(self.flags, batch, cached, self.reloaded, streamed)
        control = read_setting(Path(self.launch.evidence)).control
        fault = cached > 0 if control.fault == "mask-top-left" else bool(control.fault)
        shift = 1.0 if fault or type(self).bug(served) or self.adapter == OTHER_ADAPTER else 0.0
        forces, file = rid.startswith(FORCED_REQUEST), Path(self.launch.evidence) / "forced.json"
        forced = json.loads(file.read_text()).get(rid, ()) if forces else ()
        sequence, output = list(ids), []
        for _ in range(depth):
            top = self._top(sum(sequence), shift)
            output.append((top, forced[len(sequence)] if len(sequence) < len(forced) else top[0][1]))
            sequence.append(output[-1][1])
        self.cache.append(tuple(sequence[:-1]))
        self._trace(control, rid, sequence, shift)
        places, sums = range(start + 1, len(ids)), list(itertools.accumulate(ids))
        tops = [self._top(sums[place - 1], shift) for place in places]
        return {
            "output_ids": [token for _, token in output],
            "meta_info": {
                "prompt_tokens": len(ids),
                "cached_tokens": cached,
                "finish_reason": {"type": "length"},
                "num_retractions": int(batch > 1 and "SGLANG_TEST_RETRACT" in self.launch.extra),
                "input_token_logprobs": [[None, ids[start], None], *([-1.0 - shift, ids[place], None] for place in places)],
                "input_top_logprobs": [None, *tops],
                "output_token_logprobs": [[top[0][0], top[0][1], None] for top, _ in output],
                "output_top_logprobs": [top for top, _ in output],
            },
        }

    def _trace(self, control: Control, rid: str, sequence: list[int], shift: float) -> None:
        """Write the trace that the control asks for: of numbers that depend on the tokens, and in one layer on a bug."""
        if control.traced is None or control.traced.request != rid:
            return
        ids = sequence[: control.traced.until + 1]
        positions, kept = torch.arange(len(ids)), {}
        for layer in range(LAYERS):
            for kind, heads in (("q.", 4), ("new_k.", 2), ("new_v.", 2), ("k.", 2), ("v.", 2), ("layer.", 4)):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{kind}{layer}{ids}".encode()))
                size = 1 + shift if (kind, layer) == ("layer.", SPOILED) else 1.0
                kept[f"{kind}{layer}"] = size * torch.randn(len(ids), heads, 8, generator=generator)
        header = TraceHeader(run=self.launch.extra[RUN], request=rid, phase="extend", number=0, rank=0, ranks=1)
        write_pass(Path(self.launch.evidence), control.trace, torch.tensor(ids), positions, kept, header)

    def _cached(self, ids: list[int], start: int) -> int:
        if "--disable-radix-cache" in self.flags or "SGLANG_RADIX_FORCE_MISS" in self.launch.extra:
            return 0
        page = int(self.flags.get("--page-size", 1))
        shared = [
            next((n for n, pair in enumerate(zip(ids, known, strict=False)) if pair[0] != pair[1]), min(len(ids), len(known)))
            for known in self.cache
        ]
        return min(max(shared, default=0), start) // page * page

    @staticmethod
    def _top(total_of_history: int, shift: float) -> list[list[Any]]:
        first = total_of_history % VOCABULARY
        logits = [3.0 - shift, 2.0 + shift, 1.0]
        total = math.log(sum(map(math.exp, logits)))
        return [[logit - total, (first + n) % VOCABULARY, None] for n, logit in enumerate(logits)]
