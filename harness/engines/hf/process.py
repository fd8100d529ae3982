"""A server of transformers: ``python -m assay.harness.engines.hf.process FLAGS``, in OpenAI's protocol as far as assay speaks it.

Requests are computed one after the other, so an answer never depends on another one.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.engines.hf.model import Model
from assay.harness.engines.inside.control import API_KEY, EVIDENCE
from assay.harness.engines.inside.process_fingerprint import describe_process
from assay.harness.evidence.fingerprint import OF_PROCESS, Fingerprint, Resolved
from assay.harness.evidence.run_file import nonce_of_process
from assay.harness.evidence.trace import TraceHeader, write_pass
from assay.harness.fingerprint.folder_readings import beside_config, generation_of, settings_of
from assay.harness.fingerprint.in_model import held_floats

_Body = Mapping[str, Any]


class Served:
    """A model behind the paths of a server."""

    def __init__(self, folder: Path, name: str, device: str, *, trusted: bool = False) -> None:
        self.model, self.name, self._trusted = Model(folder, device=device, trusted=trusted), name, trusted
        self._tokenizer, self._asked = self.model.tokenizer(), 0
        told = [self.model.network.generation_config.eos_token_id, self._tokenizer.eos_token_id]
        self._ends = {id_ for ids in told if ids is not None for id_ in (ids if isinstance(ids, list) else [ids])}

    def get(self, path: str) -> Any:
        """Answer a GET request. Raises KeyError for an unknown path."""
        return {"/v1/models": lambda: {"data": [{"id": self.name}]}, "/server_info": self.about}[path]()

    def post(self, path: str, body: _Body) -> Any:
        """Answer a POST request. Raises KeyError for an unknown path."""
        known: Mapping[str, Callable[[_Body], Any]] = {
            "/v1/chat/completions": self._chat, "/tokenize": self._tokenize, "/generate": self._generate, "/score": self._score,
            "/flush": lambda _: self.model.forget(), "/fingerprint": self._write, "/trace": self._trace,
        }  # fmt: skip
        return known[path](body)

    def about(self) -> dict[str, Any]:
        """Say what is served, and how."""
        import transformers

        network = self.model.network
        return {
            "version": transformers.__version__, "model_path": str(self.model.folder), "attention": "eager",
            "dtype": str(network.dtype).removeprefix("torch."), "device": str(network.device),
        }  # fmt: skip

    def describe(self) -> Fingerprint:
        """Take the fingerprint."""
        about, folder, network = self.about(), str(self.model.folder), self.model.network
        beside = beside_config(folder, code=self._trusted)
        parts: dict[str, Callable[[], Any]] = {
            "tokens": self.model.tokens, "generation": lambda: generation_of(folder), "rope": self.model.ropes,
            "config": lambda: settings_of(network.config.to_dict() | beside) | held_floats(network),
            "weights": self.model.weights, "adapters": dict, "experts": dict,
            "quantisation": lambda: dict.fromkeys(("weights", "kv cache"), about["dtype"]),
            "backends": lambda: (Resolved(operation="attention", runs="transformers, eager"),),
        }  # fmt: skip
        return describe_process("hf", about["version"], folder, about["device"], parts)

    def _write(self, body: _Body) -> dict[str, Any]:
        OF_PROCESS.write(Path(os.environ[EVIDENCE]), self.describe(), process=f"{body['label']}-0000")
        return {}

    def _trace(self, body: _Body) -> dict[str, Any]:
        ids, label = torch.tensor(body["ids"]), body["label"]
        header = TraceHeader(run=nonce_of_process(), request=label, phase="extend", number=0, rank=0, ranks=1)
        write_pass(
            Path(os.environ[EVIDENCE]), label, ids, torch.arange(len(ids)), self.model.trace(body["ids"]), header
        )
        return {}

    def _ids_of(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        more = {"tools": tools} if tools else {}
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **more)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize(self, body: _Body) -> dict[str, Any]:
        if "messages" in body:
            return {"tokens": self._ids_of(body["messages"], body.get("tools"))}
        return {"tokens": self._tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]}

    def _chat(self, body: _Body) -> dict[str, Any]:
        ids, top = self._ids_of(body["messages"]), int(body.get("top_logprobs") or 0)
        return self._answered(ids, body["max_tokens"], self._ends, top, self._tokenizer.decode)

    def _generate(self, body: _Body) -> dict[str, Any]:
        return self._answered(body["ids"], body["tokens"], (), body["top"], lambda ids, **_: " ".join(map(str, ids)))

    def _answered(
        self, ids: Sequence[int], most: int, ends: Collection[int], top: int, text: Callable[..., str]
    ) -> dict[str, Any]:
        """Generate an answer, in the form of a chat completion; `text` makes the text of tokens."""
        cached, told, content = self.model.reusable(ids[:-1]), list[int](), []
        for id_, scores in self.model.generate(ids, most, ends):
            told.append(id_)
            best = zip(*map(Tensor.tolist, scores.topk(top)), strict=True)
            others = [{"token": text([other]), "logprob": score} for score, other in best]
            content.append({"token": text([id_]), "logprob": float(scores[id_]), "top_logprobs": others})
        self._asked += 1
        ended = told[-1] in ends
        choice = {
            "message": {"content": text(told, skip_special_tokens=True)}, "finish_reason": "stop" if ended else "length",
            "matched_stop": told[-1] if ended else None, "token_ids": told, "logprobs": {"content": content},
        }  # fmt: skip
        usage = {
            "prompt_tokens": len(ids), "completion_tokens": len(told), "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        return {"id": f"hf-{self._asked}", "choices": [choice], "prompt_token_ids": list(ids), "usage": usage}

    def _score(self, body: _Body) -> dict[str, Any]:
        """Score the tokens after the first ``start + 1``; see `assay.harness.engines.base.Engine.score`."""
        ids, start = body["ids"], body["start"]
        scores, reused = self.model.log_probabilities(ids, start)
        scores = scores[start - reused : -1]
        best = scores.topk(body["top"], -1)
        own = scores.gather(1, torch.tensor(ids[start + 1 :], device=scores.device)[:, None])[:, 0]
        told = {"token": own, "top_ids": best.indices, "top": best.values, "at": scores[:, body["at"]]}
        return {"cached_tokens": reused} | {name: each.tolist() for name, each in told.items()}


def _handler(served: Served, key: str) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(lambda: {} if self.path == "/health" else served.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            self._reply(lambda: served.post(self.path, body))

        def _reply(self, make: Callable[[], Any]) -> None:
            status = 200
            if self.path != "/health" and self.headers["Authorization"] != f"Bearer {key}":
                status, told = 401, {"error": "the key is missing"}
            else:
                try:
                    with one_at_a_time:
                        told = make()
                except Exception as error:  # a chat template and a model's code may raise anything
                    status, told = 400, {"error": f"{type(error).__name__}: {error}"}
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: Any) -> None:
            """Log no request: they would hide what transformers says."""

    return Handler


def parsed(flags: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags of a server, by default those of this process."""
    parser = argparse.ArgumentParser(prog="assay.harness.engines.hf.process")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args(flags)


def served(given: argparse.Namespace) -> Served:
    """Load what the flags of a server name."""
    return Served(given.model, given.served_model_name, given.device, trusted=given.trust_remote_code)


if __name__ == "__main__":
    given = parsed()
    made = served(given)
    ThreadingHTTPServer((given.host, given.port), _handler(made, os.environ[API_KEY])).serve_forever()
