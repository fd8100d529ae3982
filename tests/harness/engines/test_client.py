"""The client against a mock server that misbehaves in ways that a real SGLang server cannot be made to."""

import gzip
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from assay.harness.engines import client as client_module
from assay.harness.engines.base import ChatRequest
from assay.harness.engines.client import BadReply, Client, read_answer
from assay.harness.engines.remote import RemoteServer
from assay.harness.errors import EngineError
from assay.harness.evidence.records import Answer, Item

GOOD: dict[str, Any] = {
    "id": "request-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Answer: A"}, "finish_reason": "stop", "matched_stop": 2}],
    "usage": {"prompt_tokens": 20, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}},
}
Behaviour = Callable[["MockHandler"], None]


class MockHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "MockServer"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))
        else:
            self.answer(404, "not here")

    def do_POST(self) -> None:
        self.request_body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        with self.server.lock:
            self.server.asked.append(self.path)
            self.server.bodies.append(self.request_body)
            number = self.server.asked.count("/v1/chat/completions")
        if self.path == "/v1/chat/completions":
            self.server.behaviours[min(number, len(self.server.behaviours)) - 1](self)
        else:
            self.answer(404, "not here")

    def answer(self, status: int, body: str) -> None:
        raw(body.encode(), status, Content_Type="application/json")(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


class MockServer(ThreadingHTTPServer):
    """Answers the n-th request with the n-th behaviour, and all further ones with the last."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MockHandler)
        self.behaviours: list[Behaviour] = [good]
        self.models = ["mock-model"]
        self.asked: list[str] = []
        self.bodies: list[str] = []
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


def good(handler: MockHandler) -> None:
    handler.answer(200, json.dumps(GOOD))


def body(text: str, status: int = 200) -> Behaviour:
    return lambda handler: handler.answer(status, text)


def changed(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def hang(handler: MockHandler) -> None:
    handler.server.ended.wait(30)


def raw(content: bytes, status: int = 200, **headers: str) -> Behaviour:
    """Answers with these bytes, and further headers."""

    def behave(handler: MockHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return behave


def close(handler: MockHandler) -> None:
    handler.close_connection = True


def stop_midway(handler: MockHandler) -> None:
    raw(b'{"id": "request', Content_Length="1000")(handler)
    handler.close_connection = True


@pytest.fixture
def mock() -> Iterator[MockServer]:
    with MockServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that cannot die, where how long to wait is not the point."""
    monkeypatch.setattr(client_module, "DEATH_WAIT_S", 0.1)


def never_dead() -> None:
    pass


LOG = "Its log ends: oops"


def make_client(mock: MockServer, timeout_s: float = 10.0, check: Callable[[], None] = never_dead) -> Client:
    return Client(
        mock.url,
        "the mock server",
        "candidate",
        "EMPTY",
        timeout_s,
        proxies=False,
        check=check,
        log_tail=lambda: "Its log ends: oops",
    )


def ask(client: Client, count: int = 1, concurrency: int = 1, top_logprobs: int = 0) -> dict[int, Answer]:
    replies: dict[int, Answer] = {}
    asks = [ChatRequest(f"question {number}", 8, top_logprobs) for number in range(count)]
    client.ask("mock-model", asks, concurrency, replies.__setitem__)
    return replies


def test_a_good_reply_is_read_completely(mock: MockServer) -> None:
    reply = ask(make_client(mock))[0]
    assert (reply.request_id, reply.text, reply.finish_reason) == ("request-1", "Answer: A", "stop")
    assert reply.stopped_at == "2"
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (20, 4, 16)
    assert 0 < reply.latency_s < 10
    assert reply.tokens == ()


def test_an_answer_is_the_stored_record_of_its_item(mock: MockServer) -> None:
    item = Item(suite="accuracy", id="q7", prompt="Which?", prompt_hash="h", expected="B")
    answers: dict[int, Answer] = {}
    make_client(mock).ask("mock-model", [ChatRequest.of(item, 8, repeat=1)], 1, answers.__setitem__)
    assert answers[0].key == ("accuracy", "candidate", "q7", 1)
    assert (answers[0].parsed, answers[0].prompt_hash) == ("A", "h")
    assert json.loads(mock.bodies[0])["messages"][0]["content"] == "Which?"


def test_the_request_body(mock: MockServer) -> None:
    ask(make_client(mock), top_logprobs=0)
    sent = json.loads(mock.bodies[0])
    assert sent == {
        "model": "mock-model",
        "messages": [{"role": "user", "content": "question 0"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    mock.behaviours = [body(changed(choices=[{**GOOD["choices"][0], "logprobs": {"content": []}}]))]
    ask(make_client(mock), top_logprobs=5)
    assert json.loads(mock.bodies[1])["logprobs"] is True
    assert json.loads(mock.bodies[1])["top_logprobs"] == 5


def test_no_request_is_sent_once_there_are_enough_answers(mock: MockServer) -> None:
    replies: dict[int, Answer] = {}
    asks = [ChatRequest(f"question {number}", 8, 0) for number in range(50)]
    make_client(mock).ask("mock-model", asks, 4, replies.__setitem__, lambda: len(replies) >= 10)
    assert 10 <= len(replies) <= 13, "those in flight are awaited and kept"
    assert sorted(replies) == list(range(len(replies)))
    assert len(mock.bodies) == len(replies)


def test_every_request_is_sent_once_and_concurrency_is_bounded(mock: MockServer) -> None:
    lock, flying, most = threading.Lock(), 0, 0

    def count(handler: MockHandler) -> None:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.05)
        with lock:
            flying -= 1
        prompt = json.loads(handler.request_body)["messages"][0]["content"]
        handler.answer(200, changed(id=prompt))

    mock.behaviours = [count]
    replies = ask(make_client(mock), count=23, concurrency=5)
    assert {index: reply.request_id for index, reply in replies.items()} == {n: f"question {n}" for n in range(23)}
    assert len(mock.asked) == 23
    assert most == 5
    assert mock.connections == 5, "each worker keeps its connection"


def test_without_requests_no_server_is_contacted(mock: MockServer) -> None:
    assert ask(make_client(mock), count=0, concurrency=4) == {}
    assert mock.connections == 0
    ask(make_client(mock), count=1, concurrency=4)
    assert mock.connections == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>busy</html>", "<html>busy</html>"),
        ("", "''"),
        ('{"id": "request-1", "choi', "choi"),
        ("null", "'null'"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "choices"}), "choices"),
        (changed(choices=[{"message": {"content": None}, "finish_reason": "stop"}]), "text"),
        (changed(choices=[{"message": {"content": "x"}, "finish_reason": None}]), "finish_reason"),
        (changed(usage=None), "usage"),
        (changed(usage={"completion_tokens": 4}), "prompt_tokens"),
        (changed(usage={"prompt_tokens": 20, "completion_tokens": -4}), "completion_tokens"),
    ],
)
def test_garbage_is_an_engine_error_that_quotes_it(mock: MockServer, text: str, said: str) -> None:
    mock.behaviours = [body(text)]
    with pytest.raises(EngineError, match=said) as caught:
        ask(make_client(mock))
    assert str(caught.value).startswith("the mock server sent something other than a chat completion")
    assert "Its log ends: oops" in str(caught.value)


def test_missing_log_probabilities_are_an_engine_error(mock: MockServer) -> None:
    with pytest.raises(EngineError, match="log-probabilities were requested"):
        ask(make_client(mock), top_logprobs=3)


@pytest.mark.usefixtures("short_waits")
def test_a_persistent_http_500_is_an_engine_error(mock: MockServer) -> None:
    mock.behaviours = [body("kernel exploded", 500)]
    with pytest.raises(EngineError, match="HTTP 500: 'kernel exploded'"):
        ask(make_client(mock))
    assert len(mock.asked) == 3


def test_an_http_503_that_goes_away_is_not_an_error(mock: MockServer) -> None:
    mock.behaviours = [body("busy", 503), good]
    assert ask(make_client(mock))[0].text == "Answer: A"


def busy(retry_after: str) -> Behaviour:
    return raw(b"", 429, Retry_After=retry_after)


def test_a_retry_waits_as_long_as_the_server_says(mock: MockServer) -> None:
    mock.behaviours = [busy("1.5"), good]
    started = time.monotonic()
    assert ask(make_client(mock))[0].text == "Answer: A"
    assert time.monotonic() - started >= 1.5


@pytest.mark.usefixtures("short_waits")
def test_an_answer_that_never_ends_takes_no_longer_than_the_time_out(mock: MockServer) -> None:
    def drip(handler: MockHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not mock.ended.wait(0.1):
            handler.wfile.write(b" ")

    mock.behaviours = [drip]
    started = time.monotonic()
    with pytest.raises(EngineError, match="has not answered"):
        make_client(mock, timeout_s=1.0).post_json("/v1/chat/completions", {})
    assert time.monotonic() - started < 5


def test_an_http_400_is_not_retried(mock: MockServer) -> None:
    mock.behaviours = [body("prompt too long", 400)]
    with pytest.raises(EngineError, match="HTTP 400: 'prompt too long'"):
        ask(make_client(mock))
    assert len(mock.asked) == 1


@pytest.mark.parametrize(("behaviour", "cause"), [(close, "ServerDisconnectedError"), (stop_midway, "ContentLengthError")])
@pytest.mark.usefixtures("short_waits")
def test_a_broken_connection_is_an_engine_error(mock: MockServer, behaviour: Behaviour, cause: str) -> None:
    mock.behaviours = [behaviour]
    with pytest.raises(EngineError, match=f"did not answer .*: {cause}"):
        ask(make_client(mock))


def test_a_hang_ends_at_the_request_timeout(mock: MockServer) -> None:
    mock.behaviours = [hang]
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"has not answered a request to \S+ for 0\.5 s"):
        ask(make_client(mock, timeout_s=0.5), count=3, concurrency=3)
    assert time.monotonic() - started < 5


def test_replies_before_the_first_failure_are_passed_on(mock: MockServer) -> None:
    mock.behaviours = [good, good, body("garbage")]
    replies: dict[int, Answer] = {}
    with pytest.raises(EngineError, match="garbage"):
        make_client(mock).ask("mock-model", [ChatRequest(str(n), 8) for n in range(10)], 1, replies.__setitem__)
    assert sorted(replies) == [0, 1]
    assert len(mock.asked) == 3, "the client continued after the failure"


def test_the_death_of_the_process_ends_it_long_before_the_timeout(mock: MockServer) -> None:
    mock.behaviours = [hang]
    dies_at = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > dies_at:
            raise EngineError("it died")

    with pytest.raises(EngineError, match="it died"):
        ask(make_client(mock, timeout_s=25.0, check=check), count=4, concurrency=4)
    assert time.monotonic() < dies_at + 2


@pytest.mark.parametrize("behaviour", [close, body("dying", 500)])
def test_death_is_reported_rather_than_its_first_symptom(mock: MockServer, behaviour: Behaviour) -> None:
    """The process can be seen to be dead only two seconds after the retries have failed."""
    failed_at: list[float] = []

    def notice(handler: MockHandler) -> None:
        failed_at.append(time.monotonic())
        behaviour(handler)

    def check() -> None:
        if len(failed_at) == 3 and time.monotonic() > failed_at[-1] + 2:
            raise EngineError("it died")

    mock.behaviours = [notice]
    with pytest.raises(EngineError, match="it died"):
        ask(make_client(mock, check=check))


def test_an_error_of_the_callback_is_raised_unchanged(mock: MockServer) -> None:
    def full_disk(index: int, reply: Answer) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        make_client(mock).ask("mock-model", [ChatRequest("a", 8), ChatRequest("b", 8)], 1, full_disk)
    assert len(mock.asked) == 1


def test_log_probabilities_are_read_best_first_and_null_is_nan() -> None:
    def entry(token: str, logprob: float | None) -> dict[str, Any]:
        return {"token": token, "logprob": logprob}

    content = [
        {**entry(" A", -0.1), "top_logprobs": [entry(" B", -2.5), entry(" A", -0.1), entry(" C", None)]},
        {**entry("x", None), "top_logprobs": []},
    ]
    text = changed(choices=[{**GOOD["choices"][0], "logprobs": {"content": content}}])
    first, second = read_answer(text, ChatRequest("p", 8, 2), "candidate", 0.1).tokens
    assert (first.text, first.logprob) == (" A", -0.1)
    assert [token for token, _ in first.top] == [" A", " B", " C"]
    assert math.isnan(first.top[2][1])
    assert math.isnan(second.logprob)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"logprob": -0.1}], "token"),
        ([{"token": "A", "logprob": "high"}], "logprob: .*valid number"),
        ([{"token": "A", "logprob": -0.1, "top_logprobs": [["A", -0.1]]}], "list indices"),
    ],
)
def test_malformed_log_probabilities_are_refused(content: list[dict[str, Any]], said: str) -> None:
    text = changed(choices=[{**GOOD["choices"][0], "logprobs": {"content": content}}])
    with pytest.raises(BadReply, match=said):
        read_answer(text, ChatRequest("p", 8, 2), "candidate", 0.1)


def test_alternatives_may_be_missing() -> None:
    text = changed(choices=[{**GOOD["choices"][0], "logprobs": {"content": [{"token": "A", "logprob": -0.1}]}}])
    assert read_answer(text, ChatRequest("p", 8, 2), "candidate", 0.1).tokens[0].top == ()


def test_cached_tokens_are_none_if_the_server_does_not_report_them() -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 4}
    assert read_answer(changed(usage=usage), ChatRequest("p", 8), "candidate", 0.1).cached_tokens is None
    assert (
        read_answer(changed(usage={**usage, "prompt_tokens_details": None}), ChatRequest("p", 8), "candidate", 0.1).cached_tokens
        is None
    )


def test_an_empty_text_is_an_answer() -> None:
    text = changed(choices=[{"message": {"content": ""}, "finish_reason": "length"}])
    assert read_answer(text, ChatRequest("p", 8), "candidate", 0.1).text == ""
    with pytest.raises(BadReply):
        read_answer(text.replace('""', "null"), ChatRequest("p", 8), "candidate", 0.1)


def test_get_quotes_an_unsuccessful_response(mock: MockServer) -> None:
    with pytest.raises(EngineError, match="HTTP 404: 'not here'"):
        make_client(mock).get("/server_info", 5.0)


def test_json_is_posted_and_read(mock: MockServer) -> None:
    assert make_client(mock).post_json("/v1/chat/completions", {"input_ids": [1, 2]}) == GOOD
    assert json.loads(mock.bodies[0]) == {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (body("Oops"), "answered /v1/chat/completions with 'Oops'"),
        (body("no such thing", 400), "HTTP 400: 'no such thing'"),
        (close, "did not answer"),
        (hang, "has not answered"),
    ],
)
@pytest.mark.usefixtures("short_waits")
def test_a_failed_post_is_an_engine_error(mock: MockServer, behaviour: Behaviour, said: str) -> None:
    mock.behaviours = [behaviour]
    with pytest.raises(EngineError, match="the mock server") as caught:
        make_client(mock, timeout_s=0.5).post_json("/v1/chat/completions", {})
    assert said in str(caught.value)


def test_a_death_seen_later_explains_a_failed_post(mock: MockServer) -> None:
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) > 2:
            raise EngineError("the process is dead")

    mock.behaviours = [close]
    with pytest.raises(EngineError, match="the process is dead"):
        make_client(mock, check=check).post_json("/v1/chat/completions", {})


@pytest.mark.parametrize("waits", [True, False])
def test_a_failed_post_waits_for_a_death_unless_it_is_told_not_to(mock: MockServer, waits: bool) -> None:
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) > 4:
            raise EngineError("the process is dead")

    mock.behaviours = [body("oops", 500)]
    with pytest.raises(EngineError, match="the process is dead" if waits else "HTTP 500: 'oops'"):
        make_client(mock, check=check).post_json("/v1/chat/completions", {}, waits=waits)


def test_nothing_is_waited_for_where_assay_started_no_server(mock: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "DEATH_WAIT_S", 20.0)
    mock.behaviours = [close]
    server, began = RemoteServer("candidate", mock.url, 10.0), time.monotonic()
    with pytest.raises(EngineError, match="did not answer"):
        server.ask([ChatRequest("p", 8)], 1, lambda index, reply: None)
    assert time.monotonic() - began < 10


def test_a_server_that_is_not_there() -> None:
    client = Client("http://127.0.0.1:9", "nobody", "candidate", "EMPTY", 1.0, proxies=False, check=never_dead, log_tail=str)
    assert client.status("/health", 1.0) is None
    with pytest.raises(EngineError, match="nobody did not answer"):
        client.get("/v1/models", 1.0)


def test_the_proxy_of_the_environment_is_for_other_machines_only(mock: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", mock.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    through, around = (
        Client("http://127.0.0.1:9", "the server", "candidate", "EMPTY", 1.0, proxies=proxies, check=never_dead, log_tail=str)
        for proxies in (True, False)
    )
    assert through.status("/health", 5.0) == 404, "the answer of the proxy"
    assert around.status("/health", 5.0) is None


def test_a_packed_answer_is_unpacked(mock: MockServer) -> None:
    mock.behaviours = [raw(gzip.compress(json.dumps(GOOD).encode()), Content_Encoding="gzip")]
    assert ask(make_client(mock))[0].text == "Answer: A"


def test_a_model_whose_name_cannot_be_sent_is_an_engine_error(mock: MockServer) -> None:
    mock.models = ["\ud800"]
    with pytest.raises(EngineError, match="a list of models in OpenAI's format"):
        RemoteServer("candidate", mock.url, 10.0).start()


def test_bytes_that_are_not_text_are_an_engine_error(mock: MockServer) -> None:
    mock.behaviours = [raw(b"\xff\xfe")]
    with pytest.raises(EngineError, match="sent something other than a chat completion"):
        ask(make_client(mock))


def test_a_remote_server_is_asked_for_its_only_model(mock: MockServer) -> None:
    with RemoteServer("reference", f"{mock.url}/v1/", 10.0) as server:
        replies: dict[int, Answer] = {}
        server.ask([ChatRequest("p", 8)], 1, replies.__setitem__)
        server.flush_cache()  # it has none, and that is fine
    assert replies[0].text == "Answer: A"
    assert json.loads(mock.bodies[0])["model"] == "mock-model"
    assert "/flush_cache" in mock.asked
    assert (server.evidence, server.arguments(), server.startup_s) == (None, {}, None)


def test_an_endpoint_that_does_not_answer_is_asked_once_to_flush_its_cache_and_not_for_longer_than_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = RemoteServer("reference", f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        began = time.monotonic()
        for _ in range(4):
            server.flush_cache()
        assert time.monotonic() - began < 30, "the time-out of information is 60 s"
        silent.settimeout(0.1)
        silent.accept()[0].close()
        with pytest.raises(TimeoutError):
            silent.accept()


@pytest.mark.parametrize(("models", "found"), [(["a", "b"], "serves a, b"), ([], "serves no model")])
def test_a_remote_server_must_serve_one_model(mock: MockServer, models: list[str], found: str) -> None:
    mock.models = models
    with pytest.raises(EngineError, match=f"{found}.\nExpected: one model\nWhat to do: serve a single model"):
        RemoteServer("candidate", mock.url, 10.0).start()


def test_an_endpoint_gets_what_the_openai_client_sends(mock: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gateway with several models, the one that is named; the headers that name who pays; the client's own retries."""
    seen: list[dict[str, str]] = []
    mock.models = ["other", "mine"]
    mock.behaviours = [
        lambda handler: (seen.append(dict(handler.headers)), busy("0.1")(handler))[1],
        lambda handler: (seen.append(dict(handler.headers)), good(handler))[1],
    ]
    for name, value in (("OPENAI_API_KEY", "the-key"), ("OPENAI_ORG_ID", "our-org"), ("OPENAI_PROJECT_ID", "our-project")):
        monkeypatch.setenv(name, value)
    replies: dict[int, Answer] = {}
    RemoteServer("reference", mock.url, 10.0, model="mine").ask([ChatRequest("p", 8)], 1, replies.__setitem__)
    assert replies[0].text == "Answer: A"
    assert len(seen) == 2
    for sent in seen:
        headers = {name.lower(): value for name, value in sent.items()}
        assert headers["authorization"] == "Bearer the-key"
        assert (headers["openai-organization"], headers["openai-project"]) == ("our-org", "our-project")
        assert headers["user-agent"].startswith("AsyncOpenAI/Python ")
    assert [json.loads(one)["model"] for one in mock.bodies] == ["mine", "mine"]


def test_an_endpoint_that_does_not_list_its_models_is_not_waited_for_longer_than_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = RemoteServer("reference", f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        began = time.monotonic()
        with pytest.raises(EngineError):
            server.start()
        assert time.monotonic() - began < 30, "the time-out of information is 60 s"
