"""The MLC-LLM engine against a stand-in that replays an exchange **recorded by hand**: no MLC-LLM runs here.

Routes, bodies and errors are in the shape that MLC-LLM writes at 79d603f: ``openai_entrypoints.py``, ``debug_entrypoints.py``
and ``error_protocol.py``, whose errors are JSON strings that hold JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from assay.harness.engines import client as client_module
from assay.harness.engines.base import ChatRequest, Reply
from assay.harness.engines.mlc import FLAGS, MlcServer
from assay.harness.errors import EngineError, UsageError

EVENTS = json.loads((Path(__file__).parents[2] / "data" / "traces" / "mlc_events.json").read_text())
MODEL = "HF://mlc-ai/Llama-3.2-1B-Instruct-q4f16_1-MLC"


def error_body(message: str) -> str:
    """An error as MLC-LLM's ``create_error_response`` writes it: JSON in a JSON string."""
    return json.dumps(json.dumps({"object": "error", "message": message, "code": 400}))


class Replay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ReplayServer

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": MODEL, "created": 1, "object": "model", "owned_by": "MLC-LLM"}]}
        self.answer(200, json.dumps(models) if self.path == "/v1/models" else "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        self.server.asked.append((self.path, body))
        if self.path == "/v1/chat/completions":
            self.answer(200, json.dumps({
                "id": "chatcmpl-1", "model": MODEL, "system_fingerprint": "", "object": "chat.completion", "created": 1,
                "choices": [{"finish_reason": "length", "index": 0, "message": {"content": "2", "role": "assistant"},
                             "logprobs": None}],
                "usage": {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21, "extra": None},
            }))  # fmt: skip
        elif not self.server.debug:
            self.answer(404, '{"detail":"Not Found"}')
        elif not self.server.tracing:
            self.answer(400, error_body(f'The requested model "{MODEL}" does not enable tracing'))
        else:
            self.answer(200, json.dumps(self.server.events))

    def answer(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class ReplayServer(ThreadingHTTPServer):
    daemon_threads = True
    debug = tracing = True
    events: Any = EVENTS

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Replay)
        self.asked: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayServer]:
    monkeypatch.setattr(client_module, "DEATH_WAIT_S", 0.0)
    replay = ReplayServer()
    thread = threading.Thread(target=replay.serve_forever, args=(0.02,))
    thread.start()
    yield replay
    replay.shutdown()
    thread.join()
    replay.server_close()


def test_a_server_is_asked_and_its_trace_collected(server: ReplayServer) -> None:
    replies: list[Reply] = []
    with MlcServer("reference", f"{server.url}/v1", 10.0) as engine:
        engine.ask([ChatRequest("1 + 1?", 1)], 1, lambda index, reply: replies.append(reply))
        assert engine.event_trace() == EVENTS
        assert engine.label == f"MLC-LLM at {server.url}"
    assert [reply.text for reply in replies] == ["2"]
    assert replies[0].cached_tokens is None
    assert [path for path, _ in server.asked] == ["/v1/chat/completions", "/debug/dump_event_trace"]
    assert server.asked[1][1] == {"model": MODEL}


@pytest.mark.parametrize("lacks", ["debug", "tracing"])
def test_a_server_without_the_flags_says_which_it_needs(server: ReplayServer, lacks: str) -> None:
    setattr(server, lacks, False)
    with pytest.raises(EngineError) as raised:
        MlcServer("reference", server.url, 10.0).event_trace()
    assert all(flag in raised.value.expected and flag in raised.value.do for flag in FLAGS)
    assert ("404" if lacks == "debug" else "does not enable tracing") in raised.value.found


def test_an_answer_that_is_no_list_of_events(server: ReplayServer) -> None:
    server.events = {"detail": "?"}
    with pytest.raises(EngineError, match="a list of events"):
        MlcServer("reference", server.url, 10.0).event_trace()


@pytest.mark.parametrize("name", [f"mlc:{MODEL}", "llama", "ftp://x", "http://127.0.0.1:notaport"])
def test_what_is_no_url_of_a_server(name: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of an MLC-LLM server") as raised:
        MlcServer("reference", name, 10.0)
    assert "http://HOST:PORT" in raised.value.expected
