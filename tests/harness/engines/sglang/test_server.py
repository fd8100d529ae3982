"""Real SGLang servers. A start takes tens of seconds: these tests share the session's pair and end only servers of their own."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from assay.harness.engines.base import ChatRequest
from assay.harness.engines.guardian import _shared_files
from assay.harness.engines.launch import Launch
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.sglang import server as sglang
from assay.harness.engines.sglang.arguments import differences
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.errors import EngineError
from assay.harness.evidence.records import Answer

pytestmark = [pytest.mark.server, pytest.mark.slow]
ROOT = Path(__file__).parents[4]
ServerPair = tuple[SGLangServer, SGLangServer]
HEADER = "Facts, trades with: Jungal bawexn . Koven solfinn ."


def make(folder: Path, **changes: Any) -> SGLangServer:
    return SGLangServer(Launch(**{
        "role": "candidate", "backend": "torch_native", "model": TINY_MODEL, "device": "cpu", "evidence": folder / "evidence",
        "log": folder / "server.log", "decode_backend": "torch_native", "startup_timeout": 300.0, "request_timeout": 60.0,
        "cpu_core": 0, **changes,
    }))  # fmt: skip


def family(server: SGLangServer) -> list[psutil.Process]:
    assert server._process is not None
    guardian = psutil.Process(server._process.pid)
    return [guardian, *guardian.children(recursive=True)]


def scheduler(processes: list[psutil.Process]) -> psutil.Process:
    return next(process for process in processes if "sglang::scheduler" in " ".join(process.cmdline()))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SGLangServer]:
    """A server for a test that ends it."""
    with make(tmp_path) as server:
        yield server


def ask_all(server: SGLangServer, asks: list[ChatRequest], concurrency: int = 4) -> list[Answer]:
    replies: dict[int, Answer] = {}
    server.ask(asks, concurrency, replies.__setitem__)
    return [replies[index] for index in range(len(asks))]


def test_a_ready_server_identifies_itself(server_pair: ServerPair) -> None:
    reference, candidate = server_pair
    assert re.fullmatch(r"SGLang \d+\.\d+\.\d+\S* on cpu", reference.label)
    assert reference.url != candidate.url
    assert reference.startup_s is not None
    assert reference.startup_s > 0
    assert f"--attention-backend {candidate.backend}" in candidate.launch_command
    assert candidate.arguments()["attention_backend"] == candidate.backend
    names = candidate.client().models()
    assert len(names) == 1
    assert re.fullmatch(r"assay-candidate-[0-9a-f]{8}", names[0])
    reference.check()
    candidate.check()


def test_a_pair_differs_in_nothing_but_its_backend(server_pair: ServerPair) -> None:
    reference, candidate = (server.arguments() for server in server_pair)
    assert len(reference) > 300
    assert differences(reference, candidate) == {}
    assert differences(reference, {**candidate, "dtype": "bfloat16"}) == {"dtype": ("float32", "bfloat16")}


def test_questions_are_answered_with_counts_and_log_probabilities(server_pair: ServerPair) -> None:
    server = server_pair[0]
    asks = [ChatRequest(f"{HEADER}\nWhom does Koven trade with? {number}", 6, top_logprobs=3) for number in range(8)]
    replies = ask_all(server, asks)
    assert len({reply.request_id for reply in replies}) == len(asks)
    for reply in replies:
        assert reply.finish_reason in ("stop", "length")
        assert len(reply.tokens) == reply.completion_tokens
        for token in reply.tokens:
            assert token.logprob <= 0
            assert not math.isnan(token.logprob)
            assert len(token.top) == 3
            assert token.top[0][1] >= token.top[1][1] >= token.top[2][1]
            assert token.logprob == pytest.approx(token.top[0][1])  # temperature 0


def test_the_prefix_cache_is_reported_and_can_be_flushed(server_pair: ServerPair) -> None:
    server = server_pair[0]
    question = [ChatRequest(f"{HEADER}\nIs this prompt cached?", 2)]
    server.flush_cache()
    assert ask_all(server, question)[0].cached_tokens == 0
    again = ask_all(server, question)[0]
    assert again.cached_tokens is not None
    assert again.prompt_tokens - 1 == again.cached_tokens >= 16
    server.flush_cache()
    assert ask_all(server, question)[0].cached_tokens == 0


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/generate", "/flush_cache", "/v1/chat/completions"])
def test_strangers_are_not_answered(server_pair: ServerPair, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server_pair[0].url}{path}")


def test_the_key_is_not_in_what_a_run_records(server_pair: ServerPair) -> None:
    for server in server_pair:
        key = server._key
        assert len(key) >= 32
        assert key not in server.launch_command
        assert key not in json.dumps(server.arguments())
        assert server._process is not None
        assert key not in server._process.log_tail()
        assert all(key not in " ".join(process.cmdline()) for process in family(server))


def test_stop_leaves_no_process_and_no_litter(own_server: SGLangServer) -> None:
    server = own_server
    processes = family(server)
    shared = set().union(*(_shared_files(process.pid) for process in processes))
    assert shared, "SGLang keeps its load in shared memory"
    assert len(processes) >= 4  # guardian, main, scheduler, detokenizer
    assert server._process is not None
    scratch = Path(processes[1].environ()["TMPDIR"])
    assert any(scratch.iterdir())
    server.stop()
    assert not any(process.is_running() for process in processes)
    assert not scratch.exists()
    assert not [path for path in shared if Path(path).exists()]
    server.stop()
    with pytest.raises(EngineError, match="the candidate server"):
        server.check()


def test_the_death_of_a_scheduler_is_seen_while_it_is_asked(own_server: SGLangServer) -> None:
    server = own_server
    processes = family(server)
    victim = scheduler(processes)
    victim.send_signal(signal.SIGSTOP)  # so that it cannot answer before it dies

    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        victim.kill()

    timer = threading.Timer(0.5, kill)
    timer.start()
    with pytest.raises(EngineError, match="after it was ready") as died:
        ask_all(server, [ChatRequest("hello", 4)] * 4)
    took = time.monotonic() - killed_at[0]
    assert took < 5, f"death was seen only after {took:.1f} s"
    assert "scheduler" in str(died.value)
    assert not any(process.is_running() for process in processes[1:])


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    server = make(tmp_path, startup_timeout=1.0)
    with pytest.raises(EngineError, match="was not ready after 1 s"):
        server.start()
    assert server._process is not None
    assert server._process.exit_status is not None


class ForeignHandler(BaseHTTPRequestHandler):
    """Another, healthy model server that took the port."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "somebody-else"}]}')

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_another_server_on_the_port_is_not_mistaken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ForeignHandler) as foreign:
        thread = threading.Thread(target=foreign.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setattr(sglang, "_free_port", lambda: foreign.server_port)
        server = make(tmp_path)
        try:
            with pytest.raises(EngineError, match=r"3 attempts: .* another server, which serves \['somebody-else'\]"):
                server.start()
        finally:
            foreign.shutdown()
            thread.join()
    assert server._process is not None
    assert server._process.exit_status is not None


def test_killing_the_parent_with_sigkill_leaves_no_process_of_the_server(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            processes = psutil.Process(parent.pid).children(recursive=True)
            if any("sglang::scheduler" in " ".join(process.cmdline()) for process in processes):
                break
            assert time.monotonic() < deadline, "no scheduler came up"
            time.sleep(0.2)
    finally:
        parent.kill()
        parent.wait()
    _, left = psutil.wait_procs(processes, timeout=15)
    assert left == []


if __name__ == "__main__":  # the parent that is killed
    make(Path(sys.argv[1])).start()
