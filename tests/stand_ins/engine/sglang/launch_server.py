"""``python -m sglang.launch_server``: the stand-in's server. See the package.

Environment variables, for tests:

- STAND_IN_FAILS: "ROLE:FAILURE", where FAILURE is one of `FAILURES`.
- STAND_IN_SAYS: a file, for the failure "says".
- STAND_IN_LOG: a file to which a line is appended for each chat request: role, request id, hash of the prompt, and "sent" once the
  answer was sent. Requests under a seeded fault or a trace are left out. Beside it, "….shared" lists the server's files in shared
  memory.
- STAND_IN_PACE_S: seconds that an answer takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAILURES = {
    "dies-starting": "exits before it listens",
    "says": "writes the file that STAND_IN_SAYS names, and ends as SGLang does that wrote it",
    "dies-loading": "exits while /health says 503",
    "child-ends": "its scheduler exits, and the rest waits for it",
    "dies-answering": "exits at its 20th request",
    "dies-flushing": "exits when it is to empty its cache, after its first requests",
    "dies-idle": "exits a moment after its last request",
    "slow": "takes 0.2 s for each byte of its 20th answer",
    "reset": "resets the connection of every answer from its 20th on",
    "truncated": "ends every answer from its 20th on in the middle",
    "malformed": "sends every answer from its 20th on as JSON of something else",
    "keyless": "answers without the key",
}
FAILS_FROM, LAYERS, HEADER_TOKENS = 20, 4, 54


def arguments() -> dict[str, Any]:
    """All flags, known or not."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--port", "--served-model-name", "--attention-backend"):
        parser.add_argument(flag)
    known, rest = parser.parse_known_args()
    return {**vars(known), "flags": [flag for flag in rest if not flag.startswith("/")], "api_key": os.environ["ASSAY_API_KEY"]}


class State:
    """What the server knows and counts."""

    def __init__(self) -> None:
        from assay.harness.evidence.counters import FOLDER, CounterFile

        self.arguments = arguments()
        self.folder = Path(os.environ["ASSAY_EVIDENCE"])
        self.role, self.run = self.folder.name, os.environ.get("ASSAY_RUN", "")
        self.key = os.environ["ASSAY_API_KEY"]
        self.ready_at = time.monotonic() + 0.3
        role, _, failure = os.environ.get("STAND_IN_FAILS", "").partition(":")
        self.failure = failure if role == self.role else ""
        self.pace_s = float(os.environ.get("STAND_IN_PACE_S", "0"))
        self.lock, self.requests, self.header_cached = threading.Lock(), 0, False
        self.counters = CounterFile(self.folder / FOLDER, str(os.getpid()), self.run)
        items = self.folder.parents[1] / "items.jsonl"
        lines = [json.loads(line) for line in items.read_text().splitlines()] if items.exists() else []
        self.expected = {line["prompt"]: line["expected"] for line in lines}

    def controlled(self) -> bool:
        """Whether something is seeded or traced at the moment."""
        path = self.folder / "control.json"
        control = json.loads(path.read_text())["control"] if path.exists() else {}
        return any(control.values())

    def admit(self, tokens: int, output: int) -> tuple[str, int]:
        """Count the calls of a request; its id and its cached tokens."""
        from assay.harness.evidence.counters import ADMISSIONS, Admission, CounterRow

        with self.lock:
            rid, cached = uuid.uuid4().hex, HEADER_TOKENS if self.header_cached else 0
            self.header_cached = True
            name = self.arguments["attention_backend"]
            rows = [CounterRow(backend=name, kernel=name, phase="extend", cached_prefix=bool(cached))]
            rows += [CounterRow(backend=name, kernel=name, phase="decode", cached_prefix=True)] * (output - 1)
            for row in rows:
                for layer in range(LAYERS):
                    self.counters.add(self.counters.row(row), layer)
            line = Admission(run=self.run, process=os.getpid(), rids=(rid,), new=(tokens - cached,), prefix=(cached,))
            with (self.folder / ADMISSIONS).open("a") as file:
                file.write(line.model_dump_json() + "\n")
        return rid, cached

    def tell(self) -> None:
        """Write the fingerprint that is asked for, as the plugin does after a pass."""
        from assay.harness.evidence.fingerprint import OF_PROCESS, Fingerprint, Resolved

        path = self.folder / "control.json"
        label = json.loads(path.read_text())["control"]["fingerprint"] if path.exists() else ""
        if label:
            model = sys.argv[sys.argv.index("--model-path") + 1]
            backends = (Resolved(operation="attention", runs=self.arguments["attention_backend"]),)
            made = Fingerprint(
                source="server", engine="SGLang 0.5.23 on cpu", model=model, packages={"stand-in": "1"}, backends=backends
            )
            OF_PROCESS.write(self.folder, made, process=f"{label}-0000")

    def note(self, prompt: str, rid: str, what: str) -> None:
        if (log := os.environ.get("STAND_IN_LOG")) and not self.controlled():
            with open(log, "a") as file:
                file.write(f"{self.role} {rid} {hashlib.sha256(prompt.encode()).hexdigest()[:16]} {what}\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State
    child: int

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/health":
            ready = time.monotonic() > state.ready_at
            if state.failure == "dies-loading":
                os._exit(3)
            self.answer(200 if ready else 503, "")
        elif not self.allowed():
            self.answer(401, "")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": state.arguments["served_model_name"]}]}))
        else:
            self.answer(200, json.dumps({**state.arguments, "version": "0.5.23", "dtype": "float32"}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if not self.allowed():
            self.answer(401, "")
        elif self.path.startswith("/flush_cache"):
            if self.state.failure == "dies-flushing" and self.state.requests > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.state.header_cached = False
            self.answer(200, "")
        elif self.path == "/v1/chat/completions":
            self.chat(json.loads(body))
        elif self.path == "/v1/completions":
            self.answer(200, json.dumps({"choices": [{"text": json.loads(body)["prompt"].upper()}]}))
        else:
            self.answer(404, "")

    def allowed(self) -> bool:
        return self.state.failure == "keyless" or self.headers.get("Authorization") == f"Bearer {self.state.key}"

    def chat(self, body: dict[str, Any]) -> None:
        state = self.state
        with state.lock:
            state.requests += 1
            failing = state.requests >= FAILS_FROM
        if failing and state.failure == "dies-answering":
            os.kill(os.getpid(), signal.SIGKILL)
        prompt = body["messages"][0]["content"]
        expected = state.expected.get(prompt)
        text = f"Answer: {expected}" if expected else "yes"
        tokens, output = HEADER_TOKENS + 46, 3
        rid, cached = state.admit(tokens, output)
        state.tell()
        time.sleep(state.pace_s)
        choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "stop"}
        if body.get("logprobs"):
            top = [{"token": text, "logprob": -0.1}, {"token": "no", "logprob": -3.0}]
            choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
        usage = {"prompt_tokens": tokens, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
        reply = json.dumps({"id": rid, "choices": [choice], "usage": usage})
        state.note(prompt, rid, "asked")
        self.answer(200, reply, state.failure if failing else "")
        state.note(prompt, rid, "sent")
        if state.failure == "dies-idle" and failing:
            threading.Timer(0.05, os._exit, (4,)).start()

    def answer(self, status: int, body: str, failure: str = "") -> None:
        data = (json.dumps({"error": "\x1b[31m<script>\u202e"}) if failure == "malformed" else body).encode()
        if failure == "reset":
            self.connection.shutdown(2)
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if failure == "truncated":
            data, self.close_connection = data[: len(data) // 2], True
        for byte in data if failure == "slow" else ():
            self.wfile.write(bytes([byte]))
            time.sleep(0.2)
        if failure != "slow":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that leave early are part of the tests


def main() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    state = State()
    if state.failure == "child-ends":
        state.ready_at = float("inf")
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sglang::scheduler", "2"])
    print(f"ServerArgs(api_key={state.key!r})", flush=True)
    shared = Path(f"/dev/shm/sglang_loads_stand_in_{os.getpid()}.shm")
    with shared.open("wb+") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    if log := os.environ.get("STAND_IN_LOG"):
        with open(f"{log}.shared", "a") as file:
            file.write(f"{shared}\n")
    tempfile.mkstemp()
    if state.failure == "says":
        said = Path(os.environ["STAND_IN_SAYS"]).read_text()
        print(said, file=sys.stderr, flush=True)
        os.kill(child, signal.SIGKILL)
        if "Traceback" in said and "sigquit" not in said.lower():  # an exception of the main process; else it kills all of them
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if state.failure == "dies-starting":
        print("out of memory, says the stand-in", file=sys.stderr, flush=True)
        time.sleep(0.5)
        os._exit(2)
    Handler.state, Handler.child = state, child
    with Server(("127.0.0.1", int(state.arguments["port"])), Handler) as server:
        server.serve_forever(0.05)
    mapped.close()


if __name__ == "__main__":
    main()
