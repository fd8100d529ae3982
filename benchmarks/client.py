"""What assay itself costs: CPU time of its process, compared with bare clients that send the same requests.

    python benchmarks/client.py              a stub server that answers at once
    python benchmarks/client.py --real       also a real SGLang server on the CPU, started here
    python benchmarks/client.py --server URL also a server that is already running

First table: CPU time per request, without imports. From a bare client up to assay's interview, which parses and validates every
answer and has it on disk before the next one; medians of turns that alternate. Second table: whole processes, from their start to
their exit. ``assay run`` asks two roles, flushes the cache between its cold questions, imports what it needs, and writes its
reports; the bare client only sends as many requests to the same server.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from assay.harness.engines.base import Engine

MODEL, CONCURRENCY, ROLES = "stub", 32, 2
PATH = "/v1/chat/completions"
CONSOLE = Console(width=140)


class Stub(asyncio.Protocol):
    """Answers every request at once, with what SGLang answers to a question."""

    models = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
    completion = json.dumps(
        {
            "id": "0123456789abcdef0123456789abcdef",
            "object": "chat.completion",
            "created": 1700000000,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Answer: A", "tool_calls": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "matched_stop": 3,
                }
            ],
            "usage": {
                "prompt_tokens": 300,
                "total_tokens": 304,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 256},
            },
        }
    )

    def __init__(self) -> None:
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, rest = self.received.split(b"\r\n\r\n", 1)
            _, _, length = head.lower().partition(b"content-length:")
            size = int(length.split(b"\r\n", 1)[0] or 0)
            if len(rest) < size:
                return
            self.received = rest[size:]
            body = (self.models if head.startswith(b"GET") else self.completion).encode()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )


async def serve_stub() -> None:
    """Print the port and answer until killed."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def stub_server() -> Iterator[str]:
    """The URL of a stub server in a process of its own."""
    with subprocess.Popen([sys.executable, __file__, "--as", "stub"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@contextmanager
def real_server() -> Iterator[str]:
    """The URL of an SGLang server on the CPU with the built-in model."""
    from assay.harness.engines.launch import Launch
    from assay.harness.engines.model import TINY_MODEL
    from assay.harness.engines.sglang.server import SGLangServer

    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(
            role="reference", backend="torch_native", model=TINY_MODEL, device="cpu",
            evidence=Path(folder) / "evidence", log=Path(folder) / "server.log", decode_backend="torch_native",
            startup_timeout=900, request_timeout=300,
        )  # fmt: skip
        with SGLangServer(launch) as server:
            yield server.url


Send = Callable[[dict[str, Any]], Awaitable[object]]


async def send_all(send: Send, bodies: list[dict[str, Any]]) -> None:
    """Send all bodies, `CONCURRENCY` at a time."""
    waiting = iter(bodies)

    async def work() -> None:
        for body in waiting:
            await send(body)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


async def aiohttp_client(url: str, bodies: list[dict[str, Any]]) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:

        async def send(body: dict[str, Any]) -> None:
            async with session.post(url + PATH, json=body) as response:
                await response.json()

        await send_all(send, bodies)


async def httpx_client(url: str, bodies: list[dict[str, Any]]) -> None:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as client:

        async def send(body: dict[str, Any]) -> None:
            (await client.post(url + PATH, json=body)).json()

        await send_all(send, bodies)


async def openai_client(url: str, bodies: list[dict[str, Any]]) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY") as client:
        await send_all(lambda body: client.chat.completions.with_raw_response.create(**body), bodies)


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU time of this process, all threads, while `run` runs."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def assay_client(url: str, bodies: list[dict[str, Any]]) -> None:
    """assay's client alone: replies are parsed and validated, and dropped."""
    from assay.harness.engines.base import ChatRequest
    from assay.harness.engines.remote import RemoteServer

    asks = [ChatRequest(body["messages"][0]["content"], body["max_tokens"]) for body in bodies]
    RemoteServer("reference", url, 300.0).ask(asks, CONCURRENCY, lambda index, answer: None)


def interview_seconds(url: str, questions: int) -> float:
    """CPU time of an answer in assay's interview of both roles, with every answer on disk."""
    from assay.harness.config import RunSpec
    from assay.harness.engines.remote import RemoteServer
    from assay.harness.progress import ProgressDisplay
    from assay.harness.run.collect import collect
    from assay.harness.run.plan import prepare
    from assay.harness.run.run_folder import open_folder

    plan = prepare(RunSpec.of(reference=url, candidate=url, questions=questions, suites=("accuracy",)))
    with tempfile.TemporaryDirectory() as path, ProgressDisplay(Console(file=io.StringIO())) as display:
        folder = open_folder(plan, Path(path) / "run")
        engines: list[Engine] = [RemoteServer("reference", url, 300.0), RemoteServer("candidate", url, 300.0)]
        seconds = cpu_seconds(lambda: collect(plan, folder, display, ready=engines))
        answers = folder.answers()
    # Some questions are asked again, to measure how far two answers of one server differ.
    found = len({(answer.role, answer.item) for answer in answers})
    if found != ROLES * questions:
        raise SystemExit(f"{found} questions were answered, expected {ROLES * questions}")
    return seconds / len(answers)


def request_bodies(model: str, questions: int) -> list[dict[str, Any]]:
    """What a run with so many questions asks both roles."""
    from assay.evals.mmlu import draw_questions
    from assay.evals.questions import BUILTIN_DATA
    from assay.harness.config import RunSpec

    limit = RunSpec.of(reference="triton", candidate="triton").workload.token_limit
    prompts = [question.prompt for question in draw_questions(BUILTIN_DATA, questions).questions] * ROLES
    return [
        {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": limit}
        for prompt in prompts
    ]


def per_request(url: str, questions: int, turns: int) -> Table:
    """CPU time of a request, from a bare client to the interview."""
    bodies = request_bodies(MODEL, questions)

    def each(run: Callable[[], object]) -> float:
        return cpu_seconds(run) / len(bodies)

    ways: dict[str, Callable[[], float]] = {
        "aiohttp, bare": lambda: each(lambda: asyncio.run(aiohttp_client(url, bodies))),
        "httpx, bare": lambda: each(lambda: asyncio.run(httpx_client(url, bodies))),
        "openai, bare": lambda: each(lambda: asyncio.run(openai_client(url, bodies))),
        "assay's client": lambda: each(lambda: assay_client(url, bodies)),
        "assay's interview, answers on disk": lambda: interview_seconds(url, questions),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 1):
        for name, way in ways.items():
            taken[name].append(1000 * way())
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first turn imports
    bare = medians["aiohttp, bare"]
    title = f"CPU time of a request: {len(bodies)} requests, {CONCURRENCY} in flight, a stub that answers at once"
    table = Table("client", "ms", "lowest", "highest", "x bare", title=title)
    for name, median in medians.items():
        low, high = min(taken[name][1:]), max(taken[name][1:])
        table.add_row(name, f"{median:.2f}", f"{low:.2f}", f"{high:.2f}", f"{median / bare:.1f}")
    return table


@dataclass(frozen=True)
class Cost:
    """Seconds that a process took."""

    cpu: float
    wall: float


def process_cost(argv: list[str]) -> Cost:
    """Run a process to its end."""
    begun = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - begun)


def whole_process(url: str, kind: str, questions: int, turns: int) -> Table:
    """A complete run and a bare client, as processes that alternate."""
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder) / "bodies.json"
        bodies.write_text(json.dumps(request_bodies(served_model(url), questions)))
        bare, assay = [], []
        for turn in range(turns + 1):
            flush(url)
            bare.append(process_cost([sys.executable, __file__, "--as", "bare", "--server", url, str(bodies)]))
            flush(url)
            run = ["run", "--reference", url, "--candidate", url, "--questions", str(questions), "--suites", "accuracy"]
            assay.append(process_cost([sys.executable, "-m", "assay", *run, "--out", f"{folder}/{turn}"]))
            # Not the exit status: servers behind a URL cannot be instrumented, so there is never a verdict.
            if not Path(folder, str(turn), "report.json").exists():
                raise SystemExit("assay run left no report")
    table = Table("process", "CPU s", "wall s", "x bare, CPU", "x bare, wall", title=f"Whole processes, {kind}")
    first = middle(bare[1:])
    for name, cost in (("aiohttp, bare", first), ("assay run", middle(assay[1:]))):
        ratios = (f"{cost.cpu / first.cpu:.2f}", f"{cost.wall / first.wall:.2f}")
        table.add_row(name, f"{cost.cpu:.2f}", f"{cost.wall:.2f}", *ratios)
    return table


def middle(costs: list[Cost]) -> Cost:
    """Medians."""
    return Cost(statistics.median(cost.cpu for cost in costs), statistics.median(cost.wall for cost in costs))


def served_model(url: str) -> str:
    """The only model that a server offers."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        (model,) = json.load(response)["data"]
    return str(model["id"])


def flush(url: str) -> None:
    """Empty the prefix cache."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache?timeout=10", method="POST")).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--server", help="URL of a running server to compare whole processes on")
    parser.add_argument("--real", action="store_true", help="start an SGLang server on the CPU and compare on it")
    parser.add_argument("--as", dest="part", choices=("stub", "bare"), help=argparse.SUPPRESS)  # a process of its own
    parser.add_argument("bodies", nargs="?", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "stub":
        asyncio.run(serve_stub())
    elif args.part == "bare":
        asyncio.run(aiohttp_client(args.server, json.loads(args.bodies.read_text())))
    else:
        with stub_server() as url:
            CONSOLE.print(per_request(url, args.questions, args.turns))
            CONSOLE.print(whole_process(url, "stub server", args.questions, args.turns))
        if args.server:
            CONSOLE.print(whole_process(args.server, args.server, args.questions, args.turns))
        if args.real:
            with real_server() as url:
                CONSOLE.print(whole_process(url, "SGLang on the CPU", args.questions, args.turns))


if __name__ == "__main__":
    main()
