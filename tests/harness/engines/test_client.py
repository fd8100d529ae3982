"""The client against a mock server that misbehaves in ways that a real SGLang server cannot be made to."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.harness.engines import client as client_module
from assay.harness.engines.base import ChatRequest, answers
from assay.harness.engines.client import Client, _read_stream, problem, read_answer
from assay.harness.engines.launch import Launch
from assay.harness.engines.remote import RemoteServer
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.errors import EngineError
from assay.harness.evidence.bench_folder import Stream
from assay.harness.evidence.records import Answer, Item

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Answer: A"}, "finish_reason": "stop", "matched_stop": 2}
GOOD: dict[str, Any] = {
    "id": "request-1",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 20, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}},
}
LOG_TAIL = "Its log ends: oops"
CHAT = "/v1/chat/completions"
Behaviour = Callable[["Handler"], object]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Mock

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            body(json.dumps({"data": [{"id": name} for name in self.server.models]}))(self)
        else:
            body("not here", 404)(self)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        with self.server.lock:
            self.server.asked.append(self.path)
            self.server.bodies.append(json.loads(sent or "null"))
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
            number = sum(path.endswith("/completions") for path in self.server.asked)
        if self.path.endswith("/completions"):
            self.server.behaviours[min(number, len(self.server.behaviours)) - 1](self)
        else:
            body("not here", 404)(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Mock(ThreadingHTTPServer):
    """Answers the n-th request with the n-th behaviour, and all further ones with the last."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = [good]
        self.models = ["mock-model"]
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.connections = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that leave early are part of these tests


def raw(content: bytes, status: int = 200, **headers: str) -> Behaviour:
    """Answers with these bytes, and further headers."""

    def behave(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return behave


def body(text: str, status: int = 200) -> Behaviour:
    return raw(text.encode(), status, Content_Type="application/json")


def changed(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def good(handler: Handler) -> None:
    body(json.dumps(GOOD))(handler)


def hang(handler: Handler) -> None:
    handler.server.ended.wait(30)


def close(handler: Handler) -> None:
    handler.close_connection = True


def stop_midway(handler: Handler) -> None:
    raw(b'{"id": "request', Content_Length="1000")(handler)
    handler.close_connection = True


def events(lines: Sequence[str], pause_s: float = 0.0) -> Behaviour:
    """Streams lines, each with a pause before it."""

    def behave(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for line in lines:
            time.sleep(pause_s)
            handler.wfile.write(f"{line}\n\n".encode())
        handler.close_connection = True

    return behave


@pytest.fixture
def mock() -> Iterator[Mock]:
    with Mock() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that cannot die, where how long to wait is not the point."""
    monkeypatch.setattr(client_module, "_DEATH_WAIT_S", 0.1)


def make_client(mock: Mock, timeout_s: float = 10.0, check: Callable[[], None] = lambda: None) -> Client:
    return Client(
        mock.url, "the mock server", "candidate", "EMPTY", timeout_s, "mock-model", check=check, log_tail=lambda: LOG_TAIL
    )


def ask(client: Client, count: int = 1, concurrency: int = 1, top_logprobs: int = 0) -> dict[int, Answer]:
    replies: dict[int, Answer] = {}
    asks = [ChatRequest(f"question {number}", 8, top_logprobs) for number in range(count)]
    client.ask(asks, concurrency, replies.__setitem__)
    return replies


def dead_after(looks: int) -> Callable[[], None]:
    """A check that sees the process dead after so many looks."""
    seen: list[int] = []

    def check() -> None:
        seen.append(1)
        if len(seen) > looks:
            raise EngineError("it died")

    return check


def test_a_reply_is_the_stored_answer_of_its_item(mock: Mock) -> None:
    item = Item(suite="accuracy", id="q7", prompt="Which?", prompt_hash="h", expected="A")
    replies: dict[int, Answer] = {}
    make_client(mock).ask([ChatRequest.of(item, 8, repeat=1)], 1, replies.__setitem__)
    reply = replies[0]
    assert reply.key == ("accuracy", "candidate", "q7", 1)
    assert (reply.parsed, reply.prompt_hash, reply.request_id) == ("A", "h", "request-1")
    assert (reply.text, reply.finish_reason, reply.stopped_at, reply.tokens) == ("Answer: A", "stop", "2", ())
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (20, 4, 16)
    assert 0 < reply.latency_s < 10
    assert mock.bodies[0] == {
        "model": "mock-model",
        "messages": [{"role": "user", "content": "Which?"}],
        "temperature": 0,
        "max_tokens": 8,
    }


def test_log_probabilities_are_asked_for_and_read_best_first_and_null_is_nan(mock: Mock) -> None:
    def entry(token: str, logprob: float | None) -> dict[str, Any]:
        return {"token": token, "logprob": logprob}

    content = [{**entry(" A", -0.1), "top_logprobs": [entry(" B", -2.5), entry(" A", -0.1), entry(" C", None)]}, entry("x", None)]
    mock.behaviours = [body(changed(choices=[{**CHOICE, "logprobs": {"content": content}}]))]
    first, second = ask(make_client(mock), top_logprobs=5)[0].tokens
    assert (mock.bodies[0]["logprobs"], mock.bodies[0]["top_logprobs"]) == (True, 5)
    assert (first.text, first.logprob) == (" A", -0.1)
    assert [token for token, _ in first.top] == [" A", " B", " C"]
    assert math.isnan(first.top[2][1])
    assert math.isnan(second.logprob)
    assert second.top == ()


def test_no_request_is_sent_once_there_are_enough_answers(mock: Mock) -> None:
    replies: dict[int, Answer] = {}
    asks = [ChatRequest(f"question {number}", 8) for number in range(50)]
    make_client(mock).ask(asks, 4, replies.__setitem__, lambda: len(replies) >= 10)
    assert 10 <= len(replies) <= 13, "those in flight are awaited and kept"
    assert sorted(replies) == list(range(len(replies)))
    assert len(mock.bodies) == len(replies)


def test_every_request_is_sent_once_and_concurrency_is_bounded(mock: Mock) -> None:
    lock, flying, most = threading.Lock(), 0, 0

    def count(handler: Handler) -> None:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.05)
        with lock:
            flying -= 1
        good(handler)

    mock.behaviours = [count]
    assert sorted(ask(make_client(mock), count=23, concurrency=5)) == list(range(23))
    assert sorted(each["messages"][0]["content"] for each in mock.bodies) == sorted(f"question {n}" for n in range(23))
    assert most == 5
    assert mock.connections == 5, "each worker keeps its connection"
    assert ask(make_client(mock), count=0, concurrency=4) == {}
    assert mock.connections == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>busy</html>", "<html>busy</html>"),
        ('{"id": "request-1", "choi', "choi"),
        ("null", "'null'"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "choices"}), "choices"),
        (changed(choices=[{"message": {"content": None}, "finish_reason": "stop"}]), "text"),
        (changed(choices=[{"message": {"content": "x"}, "finish_reason": None}]), "finish_reason"),
        (changed(usage=None), "usage"),
        (changed(usage={"prompt_tokens": 20, "completion_tokens": -4}), "completion_tokens"),
    ],
)
def test_garbage_is_an_engine_error_that_quotes_it(mock: Mock, text: str, said: str) -> None:
    mock.behaviours = [body(text)]
    with pytest.raises(EngineError, match=said) as caught:
        ask(make_client(mock))
    assert str(caught.value).startswith("the mock server sent something other than a chat completion")
    assert LOG_TAIL in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "log-probabilities were requested"),
        ([{"logprob": -0.1}], "token"),
        ([{"token": "A", "logprob": "high"}], "logprob: .*valid number"),
        ([{"token": "A", "logprob": -0.1, "top_logprobs": [["A", -0.1]]}], "list indices"),
    ],
)
def test_missing_or_malformed_log_probabilities_are_an_engine_error(mock: Mock, content: Any, said: str) -> None:
    mock.behaviours = [body(changed(choices=[{**CHOICE, "logprobs": {"content": content}}]))]
    with pytest.raises(EngineError, match=said):
        ask(make_client(mock), top_logprobs=2)


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}])
def test_cached_tokens_are_what_the_server_is_known_to_mean_if_it_does_not_report_them(details: dict[str, Any]) -> None:
    text = changed(usage={"prompt_tokens": 20, "completion_tokens": 4, **details})
    assert read_answer(text, ChatRequest("p", 8), "candidate", 0.1).cached_tokens is None
    assert read_answer(text, ChatRequest("p", 8), "candidate", 0.1, unreported_cache=0).cached_tokens == 0


@pytest.mark.parametrize(
    ("behaviour", "said", "requests"),
    [
        (body("kernel exploded", 500), "HTTP 500: 'kernel exploded'", 3),
        (body("prompt too long", 400), "HTTP 400: 'prompt too long'", 1),
        (close, "did not answer .*: ServerDisconnectedError", 3),
        (stop_midway, "did not answer .*: ContentLengthError", 3),
        (hang, r"has not answered a request to \S+ for 2 s", 1),
    ],
)
@pytest.mark.usefixtures("short_waits")
def test_a_failure_is_an_engine_error_after_the_retries(mock: Mock, behaviour: Behaviour, said: str, requests: int) -> None:
    mock.behaviours = [behaviour]
    with pytest.raises(EngineError, match=said):
        ask(make_client(mock, timeout_s=2.0 if behaviour is hang else 20.0))
    assert len(mock.asked) == requests


def test_the_death_of_the_process_ends_it_long_before_the_timeout(mock: Mock) -> None:
    mock.behaviours = [hang]
    began = time.monotonic()
    with pytest.raises(EngineError, match="it died"):
        ask(make_client(mock, timeout_s=120.0, check=dead_after(2)), count=4, concurrency=4)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("behaviour", [close, body("dying", 500)])
def test_death_is_reported_rather_than_its_first_symptom(mock: Mock, behaviour: Behaviour) -> None:
    """The process can be seen to be dead only two seconds after the retries have failed."""
    failed_at: list[float] = []

    def notice(handler: Handler) -> None:
        failed_at.append(time.monotonic())
        behaviour(handler)

    def check() -> None:
        if len(failed_at) == 3 and time.monotonic() > failed_at[-1] + 2:
            raise EngineError("it died")

    mock.behaviours = [notice]
    with pytest.raises(EngineError, match="it died"):
        ask(make_client(mock, check=check))


def test_nothing_is_waited_for_where_nothing_can_die(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that assay did not start; and SGLang's tokenizer, which refuses chats with HTTP 500."""
    monkeypatch.setattr(client_module, "_DEATH_WAIT_S", 120.0)
    mock.behaviours = [close]
    began = time.monotonic()
    with pytest.raises(EngineError, match="did not answer"):
        RemoteServer("candidate", mock.url, 10.0).ask([ChatRequest("p", 8)], 1, lambda index, reply: None)
    monkeypatch.setattr(client_module, "_TOKENIZE", CHAT)
    mock.behaviours = [body("no tools", 500)]
    with pytest.raises(EngineError, match="HTTP 500: 'no tools'"):
        make_client(mock).json("POST", CHAT, {})
    assert time.monotonic() - began < 60


def test_an_error_of_the_callback_is_raised_unchanged(mock: Mock) -> None:
    kept: dict[int, Answer] = {}

    def full_disk(index: int, reply: Answer) -> None:
        if kept:
            raise OSError("no space left")
        kept[index] = reply

    with pytest.raises(OSError, match="no space left"):
        make_client(mock).ask([ChatRequest(name, 8) for name in "abcd"], 1, full_disk)
    assert len(mock.asked) == 2, "the client continued after the failure"
    assert sorted(kept) == [0]


def test_json_is_posted_and_read(mock: Mock) -> None:
    assert make_client(mock).json("POST", CHAT, {"input_ids": [1, 2]}) == GOOD
    assert mock.bodies == [{"input_ids": [1, 2]}]
    mock.behaviours = [body("Oops")]
    with pytest.raises(EngineError, match=f"the mock server answered {CHAT} with 'Oops'"):
        make_client(mock).json("POST", CHAT, {})
    mock.behaviours = [events(['data: {"a": 1}', ": waiting", 'data: {"b": 2}', "data: [DONE]"])]
    assert make_client(mock).events(CHAT, {}) == [{"a": 1}, {"b": 2}]
    with pytest.raises(EngineError, match="HTTP 404: 'not here'"):
        make_client(mock).json("GET", "/server_info")


def test_a_server_that_is_not_there(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy of the environment is for other machines only."""
    monkeypatch.setenv("http_proxy", mock.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    around, through = (Client(f"http://{host}:9", "nobody", "candidate", "EMPTY", 1.0) for host in ("127.0.0.1", "nobody.invalid"))
    assert around.status("/health", 5.0) is None
    with pytest.raises(EngineError, match="nobody did not answer"):
        around.json("GET", "/v1/models")
    assert through.status("/health", 5.0) == 404, "the answer of the proxy"


def test_an_endpoint_that_does_not_answer_is_not_waited_for_longer_than_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = RemoteServer("reference", f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        began = time.monotonic()
        for _ in range(4):
            server.flush_cache()
        silent.settimeout(0.1)
        silent.accept()[0].close()
        with pytest.raises(TimeoutError):  # it is asked once
            silent.accept()
        with pytest.raises(EngineError, match="has not answered"):
            server.start()
        assert time.monotonic() - began < 30, "the time-out of information is 60 s"


@pytest.mark.parametrize(("models", "found"), [(["a", "b"], "serves a, b"), ([], "serves no model")])
def test_a_remote_server_must_serve_one_model(mock: Mock, models: list[str], found: str) -> None:
    mock.models = models
    with pytest.raises(EngineError, match=f"{found}.\nExpected: one model\nWhat to do: serve a single model"):
        RemoteServer("candidate", mock.url, 10.0).start()


def test_an_endpoint_gets_what_the_openai_client_sends(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gateway with several models, the one that is named; the headers that name who pays; the client's own retries."""
    mock.models = ["other", "mine"]
    mock.behaviours = [raw(b"", 429, Retry_After="0.1"), good]
    for name, value in (("OPENAI_API_KEY", "the-key"), ("OPENAI_ORG_ID", "our-org"), ("OPENAI_PROJECT_ID", "our-project")):
        monkeypatch.setenv(name, value)
    with RemoteServer("reference", f"{mock.url}/v1/", 10.0, model="mine") as server:
        assert answers(server, [ChatRequest("p", 8)], 1)[0].text == "Answer: A"
        server.flush_cache()  # it has none, and that is fine
    assert mock.asked == [CHAT, CHAT, "/flush_cache"]
    assert (server.evidence, server.arguments(), server.startup_s) == (None, {}, None)
    for sent in mock.headers:
        assert sent["authorization"] == "Bearer the-key"
        assert (sent["openai-organization"], sent["openai-project"]) == ("our-org", "our-project")
        assert sent["user-agent"].startswith("AsyncOpenAI/Python ")
    assert [each["model"] for each in mock.bodies[:2]] == ["mine", "mine"]


def chunk(tokens: int | None, text: str = "x", reason: str | None = None) -> str:
    usage = None if tokens is None else {"prompt_tokens": 2, "completion_tokens": tokens}
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return f"data: {json.dumps({'id': 'r1', 'choices': [choice], 'usage': usage})}"


def last(tokens: int = 3, cached: int | None = 1) -> str:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": 2, "completion_tokens": tokens, "prompt_tokens_details": details}
    return f"data: {json.dumps({'id': 'r1', 'choices': [], 'usage': usage})}"


END = "data: [DONE]"
STREAMED = [chunk(1), chunk(2, ""), chunk(3, "y", "length"), last(), END]


def read(lines: list[str]) -> Stream:
    return _read_stream([(10.0 + 0.1 * (number + 1), line) for number, line in enumerate(lines)], 3, 10.0)


@pytest.mark.parametrize(
    ("lines", "tokens", "times", "cached"),
    [
        (STREAMED, (1, 2, 3), (0.1, 0.2, 0.3), 1),  # those without text count
        ([": waiting", *STREAMED], (1, 2, 3), (0.2, 0.3, 0.4), 1),
        ([chunk(2), chunk(2, "z"), chunk(3, "y", "length"), last(), END], (2, 3), (0.1, 0.3), 1),
        ([chunk(None), chunk(None), chunk(None, "y", "length"), last(cached=None), END], (1, 2, 3), (0.1, 0.2, 0.3), None),
    ],
)
def test_tokens_are_counted_on_arrival(lines: list[str], tokens: tuple[int], times: tuple[float], cached: int | None) -> None:
    reply = read(lines)
    assert (reply.chunk_tokens, reply.chunk_s) == (tokens, pytest.approx(times))
    assert reply.latency_s == pytest.approx(0.1 * len(lines))
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (2, 3, cached)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "ended without"),
        (STREAMED[:-1], "ended without"),
        ([STREAMED[0], last(1), END], "ended without"),
        ([chunk(1), chunk(2, "y", "stop"), last(2), END], "2 tokens by its usage and 2 by its chunks, but 3"),
        ([chunk(None, "y", "length"), last(3), END], "3 tokens by its usage and 1 by its chunks, but 3"),
        (['data: {"error": {"message": "out of memory"}}', END], "out of memory"),
        (["data: <html>", END], "<html>"),
    ],
)
def test_an_incomplete_stream_is_refused(lines: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        read(lines)
    assert problem(caught.value) == str(caught.value)


def stream(
    mock: Mock, timeout_s: float = 5.0, prompts: Sequence[tuple[int, ...]] = ((1, 2),), concurrency: int = 1
) -> list[Stream]:
    return RemoteServer("candidate", mock.url, timeout_s).client().stream(prompts, 3, concurrency)


def test_times_are_those_at_which_chunks_arrived(mock: Mock) -> None:
    mock.behaviours = [events(STREAMED, 0.05)]
    for reply in stream(mock, prompts=[(1, 2), (3, 4), (5, 6)], concurrency=2):
        first, second, third = reply.chunk_s
        assert first >= 0.05
        assert second - first >= 0.03
        assert third - second >= 0.03
        assert reply.latency_s >= third
    assert sorted(sent["prompt"] for sent in mock.bodies) == [[1, 2], [3, 4], [5, 6]]
    assert all(sent["ignore_eos"] and sent["max_tokens"] == 3 and sent["temperature"] == 0 for sent in mock.bodies)
    assert all(sent["stream_options"]["continuous_usage_stats"] for sent in mock.bodies)


def keep_alive(handler: Handler) -> None:
    """Sends comments for ever."""
    events([])(handler)
    while not handler.server.ended.wait(0.05):
        handler.wfile.write(b": still here\n\n")


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        (body("kernel exploded", 500), "HTTP 500: 'kernel exploded'"),
        (events(STREAMED[:2]), "ended without a finish reason"),
        (hang, r"has not answered a request to \S+ for 0\.5 s"),
        (keep_alive, r"has not answered a request to \S+ for 0\.5 s"),
        (close, "did not answer"),
    ],
)
def test_a_stream_that_fails_is_an_engine_error_and_nothing_is_sent_twice(mock: Mock, behaviour: Behaviour, says: str) -> None:
    mock.behaviours = [behaviour]
    threading.Timer(30.0, mock.ended.set).start()
    with pytest.raises(EngineError, match=says) as caught:
        stream(mock, timeout_s=0.5)
    assert str(caught.value).startswith("the candidate server")
    assert len(mock.bodies) == 1


def server_of(folder: Path, interpreter: Path = Path()) -> SGLangServer:
    """A server that does not start, or runs a script in place of Python."""
    return SGLangServer(
        Launch(
            role="candidate", backend="triton", model=folder, device="cpu", evidence=folder / "evidence", log=folder / "log",
            decode_backend="triton", startup_timeout=60.0, request_timeout=5.0, interpreter=str(interpreter),
        )
    )  # fmt: skip


def test_a_failure_of_a_server_that_assay_started_ends_with_its_log(mock: Mock, tmp_path: Path) -> None:
    server = server_of(tmp_path)
    server.url = mock.url
    server._process = SimpleNamespace(
        exit_status=None, lost=lambda essential: None, log_tail=lambda: "Its log ends:\n  out of memory"
    )  # type: ignore[assignment]
    mock.behaviours = [events(STREAMED[:1])]
    with pytest.raises(EngineError, match=r"(?s)the stream ended without .*\n  out of memory$"):
        server.client().stream([(1, 2)], 3, 1)


@pytest.mark.parametrize(
    ("script", "cause", "said"),
    [
        ("echo address already in use; exec sleep 60", "port", "could not get a port in 3 attempts"),
        ("echo error: unrecognized arguments: --what; exit 2", "flag", "exited with status 2 during start-up"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, script: str, cause: str, said: str) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    with pytest.raises(EngineError, match=said) as caught:
        server_of(tmp_path, fake).start()
    assert caught.value.cause == cause
