"""The streaming client against a mock of a server that misbehaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.harness.engines.client import BadReply, Stream, read_stream
from assay.harness.engines.remote import RemoteServer
from assay.harness.engines.sglang.launch import Launch
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.errors import EngineError


def chunk(tokens: int | None, text: str = "x", reason: str | None = None) -> str:
    usage = None if tokens is None else {"prompt_tokens": 2, "completion_tokens": tokens}
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return f"data: {json.dumps({'id': 'r1', 'choices': [choice], 'usage': usage})}"


def last(tokens: int = 3, cached: int | None = 1) -> str:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": 2, "completion_tokens": tokens, "prompt_tokens_details": details}
    return f"data: {json.dumps({'id': 'r1', 'choices': [], 'usage': usage})}"


GOOD = [chunk(1), chunk(2, ""), chunk(3, "y", "length"), last(), "data: [DONE]"]


def timed(lines: list[str], start: float = 10.0) -> list[tuple[float, str]]:
    return [(start + 0.1 * (number + 1), line) for number, line in enumerate(lines)]


def test_tokens_are_counted_on_arrival_even_those_without_text() -> None:
    reply = read_stream(timed(GOOD), 3, 10.0)
    assert reply.chunk_s == pytest.approx((0.1, 0.2, 0.3))
    assert reply.chunk_tokens == (1, 2, 3)
    assert reply.latency_s == pytest.approx(0.5)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (2, 3, 1)


def test_a_chunk_of_several_tokens_and_one_of_none() -> None:
    lines = [chunk(2), chunk(2, "z"), chunk(3, "y", "length"), last(), "data: [DONE]"]
    reply = read_stream(timed(lines), 3, 10.0)
    assert (reply.chunk_tokens, reply.chunk_s) == ((2, 3), pytest.approx((0.1, 0.3)))


def test_without_running_counts_a_chunk_is_one_token() -> None:
    lines = [chunk(None), chunk(None), chunk(None, "y", "length"), last(cached=None), "data: [DONE]"]
    reply = read_stream(timed(lines), 3, 10.0)
    assert reply.chunk_tokens == (1, 2, 3)
    assert reply.cached_tokens is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "ended without"),
        (GOOD[:-1], "ended without"),
        ([GOOD[0], last(1), "data: [DONE]"], "ended without"),
        ([chunk(1), chunk(2, "y", "stop"), last(2), "data: [DONE]"], "2 tokens by its usage and 2 by its chunks, but 3"),
        ([chunk(None, "y", "length"), last(3), "data: [DONE]"], "3 tokens by its usage and 1 by its chunks, but 3"),
        (['data: {"error": {"message": "out of memory"}}', "data: [DONE]"], "out of memory"),
        (["data: <html>", "data: [DONE]"], "<html>"),
    ],
)
def test_an_incomplete_stream_is_refused(lines: list[str], says: str) -> None:
    with pytest.raises(BadReply, match=says):
        read_stream(timed(lines), 3, 10.0)


Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Mock

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "mock"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
        self.server.behaviour(self)

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Mock(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour: Behaviour = stream_good
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def send(handler: Handler, lines: list[str], pause_s: float) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    for line in lines:
        time.sleep(pause_s)
        handler.wfile.write(f"{line}\n\n".encode())
        handler.wfile.flush()
    handler.close_connection = True


def stream_good(handler: Handler) -> None:
    send(handler, GOOD, 0.05)


@pytest.fixture
def mock() -> Iterator[Mock]:
    server = Mock()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


def stream(
    mock: Mock, timeout_s: float = 5.0, prompts: Sequence[tuple[int, ...]] = ((1, 2),), *, concurrency: int = 1
) -> list[Stream]:
    server = RemoteServer("candidate", f"http://127.0.0.1:{mock.server_port}", timeout_s)
    return server.client().stream("mock", prompts, 3, concurrency)


def test_times_are_those_at_which_chunks_arrived(mock: Mock) -> None:
    replies = stream(mock, prompts=[(1, 2), (3, 4), (5, 6)], concurrency=2)
    assert len(replies) == 3
    for reply in replies:
        first, second, third = reply.chunk_s
        assert first >= 0.05
        assert second - first >= 0.03
        assert third - second >= 0.03
        assert reply.latency_s >= third
    assert sorted(body["prompt"] for body in mock.bodies) == [[1, 2], [3, 4], [5, 6]]
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 and body["temperature"] == 0 for body in mock.bodies)
    assert all(body["stream_options"]["continuous_usage_stats"] for body in mock.bodies)


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        (lambda h: h.answer(500, "kernel exploded"), "HTTP 500: 'kernel exploded'"),
        (lambda h: h.answer(400, "prompt too long"), "HTTP 400: 'prompt too long'"),
        (lambda h: send(h, GOOD[:2], 0.0), "ended without a finish reason"),
        (lambda h: h.server.ended.wait(20), r"has not answered a request to \S+ for 0\.5 s"),
        (lambda h: h.wfile.close(), "did not answer"),
    ],
)
def test_failures_are_engine_errors_and_nothing_is_sent_twice(
    mock: Mock, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, says: str
) -> None:
    monkeypatch.setattr("assay.harness.engines.client.DEATH_WAIT_S", 0.1)  # nothing here can die
    mock.behaviour = behaviour
    with pytest.raises(EngineError, match=says) as caught:
        stream(mock, timeout_s=0.5)
    assert str(caught.value).startswith("the candidate server")
    assert len(mock.bodies) == 1


def without_end(line: bytes, pause_s: float) -> Behaviour:
    def behaviour(handler: Handler) -> None:
        send(handler, [], 0.0)
        while not handler.server.ended.wait(pause_s):
            handler.wfile.write(line)

    return behaviour


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        (without_end(f"{GOOD[0]}\n\n".encode(), 0.001), "streams without end: [0-9]+ events"),
        (without_end(b": still here\n\n", 0.05), r"has not answered a request to \S+ for 1 s"),
    ],
    ids=["events", "comments"],
)
def test_a_stream_without_end_is_given_up(mock: Mock, behaviour: Behaviour, says: str) -> None:
    mock.behaviour = behaviour
    threading.Timer(4.0, mock.ended.set).start()
    with pytest.raises(EngineError, match=says):
        stream(mock, timeout_s=1.0)


def test_comments_between_the_chunks_are_none() -> None:
    assert read_stream(timed([": waiting", *GOOD]), 3, 10.0).chunk_tokens == (1, 2, 3)


def test_a_failure_of_a_server_that_assay_started_ends_with_its_log(mock: Mock, tmp_path: Path) -> None:
    launch = Launch(
        role="candidate", backend="triton", model=tmp_path, device="cpu", evidence=tmp_path, log=tmp_path / "log",
        decode_backend="triton", startup_timeout=5.0, request_timeout=5.0,
    )  # fmt: skip
    server = SGLangServer(launch)
    server.url = f"http://127.0.0.1:{mock.server_port}"
    server._process = SimpleNamespace(
        exit_status=None, trouble=lambda essential: None, log_tail=lambda: "Its log ends:\n  out of memory"
    )  # type: ignore[assignment]
    mock.behaviour = lambda handler: send(handler, GOOD[:1], 0.0)
    with pytest.raises(EngineError, match=r"(?s)the stream ended without .*\n  out of memory$"):
        server.client().stream("mock", [(1, 2)], 3, 1)
