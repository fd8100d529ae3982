"""Mutated files and answers through every reader: tracebacks, hangs, wrong exit codes, and escape sequences on the terminal.

``nice python benchmarks/fuzz.py --inputs 10000 --processes 16 --out faults`` mutates small whole files, which it makes itself or
takes from tests/, and what an endpoint answers over HTTP (JSON, streams, heads). It runs the command that reads each kind: in a
process of its own, forked with everything imported, with a limit of memory and one of time. It prints a row per reader, with how
many inputs ended in an exception that the door of the reader took for damage ("is not a whole X: KeyError", no fault), and every
fault once with the seed that makes its input again (``--only READER --seed N``); --out keeps each faulty input with its command and
its output. ``--first N`` begins with other seeds. The exit code is 1 if there is any fault. It needs no network, no GPU, no SGLang
and nothing but this repository; readers whose packages are not installed are named.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import gc
import gzip
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same inputs on every machine, and forked processes cannot use CUDA

import numpy as np
import torch
import typer.main
from safetensors.torch import save

from assay import evals, reports
from assay.harness import bench, cli, collect, ingest, judge, offline
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.evidence.baseline import Baseline, Key, write_baseline
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.pack import CallMetadata, Source
from assay.harness.server.pack_writer import PackWriter
from assay.reports.json_report import to_json
from assay.reports.page import to_html
from assay.reports.run_report import run_document

COMMANDS_USED = (
    "ingest",
    "compare",
    "show",
    "replay",
    "run",
    "baseline",
    "bench",
)
IMPORTED_LATER = (
    *("openai", "datasets", "httpx", "aiohttp", "transformers", "pandas", "pyarrow.parquet", "scipy.stats", "scipy.io"),
    *("anyio._backends._asyncio", "rich._emoji_codes", "typer._adapters", "assay.harness.run"),
)
"""What commands import when they run: it is imported once, before the workers."""
DATA = Path(__file__).parents[1] / "tests" / "data"
MEMORY_GB = 8
"""Address space of a command beyond that of the worker, whose libraries alone may take as much."""
PEAK_MB = 1_000
"""Memory of a command beyond that of the worker above which a small input is a fault."""
UNCAUGHT = 70
"""Exit code of an input whose exception left the command."""
HANG_S = 20
"""Seconds after which an input is a hang, on a machine with a core for each process that wants one; the slowest whole seed takes
about one."""
ANSWER_S = 2
"""Time-out of a request to a hostile endpoint."""
LONGEST_PAUSE_S = 30.0
"""The longest that an endpoint keeps a client waiting: more than a hang."""
LONGEST_ANSWER = 1 << 28
"""Most bytes that an endpoint sends: more than a client may take."""


@dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Attributes:
        name: of the row.
        seeds: makes whole files in a folder, and returns the one that is mutated; several are drawn in turn.
        command: the words behind ``assay``, of the mutated path and its whole original.
        needs: packages without which the command says only that they are missing.
        codes: exit codes that are right, whatever the input is.
    """

    name: str
    seeds: Sequence[Callable[[Path], Path]]
    command: Callable[[Path, Path], list[str]]
    needs: Sequence[str] = ()
    codes: Sequence[int] = (0, 1, 2, 3)


def copied(name: str, *beside: str) -> Callable[[Path], Path]:
    """A file of the tests' data, with others of its folder."""

    def make(folder: Path) -> Path:
        source = DATA / name
        for other in beside:
            shutil.copy(source.parent / other, folder / other)
        return Path(shutil.copy(source, folder / source.name))

    return make


def written(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    """A file with a content that is made once."""
    content = cache(content)

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content())
        return folder / name

    return make


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model.layers.0.self_attn": torch.randn(4, 8), "model.layers.1.mlp": [torch.randn(4, 8)]}, buffer)
    return buffer.getvalue()


def numpy_file() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, **{"layers.0.attn": np.ones((4, 8), np.float32), "layers.1.mlp": np.ones((4, 8), np.float32)}
    )
    return buffer.getvalue()


def array_file() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((4, 8), np.float32))
    return buffer.getvalue()


def safetensors_file() -> bytes:
    return save({"model.layers.0.self_attn": torch.randn(4, 8), "model.layers.1.mlp": torch.randn(4, 8).bfloat16()})


MMLU_COLUMNS = ("Question", "A", "B", "C", "D", "Answer", "Subject")
MMLU_ROWS = [
    (f'What is {n} + "1"?\nThink.', str(n), str(n + 1), "a, b", "None", "B", "abstract_algebra") for n in range(12)
]


def mmlu_csv() -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([MMLU_COLUMNS, *MMLU_ROWS])
    return buffer.getvalue().encode()


def mmlu_parquet() -> bytes:
    import pandas as pd

    buffer = io.BytesIO()
    pd.DataFrame(MMLU_ROWS, columns=list(MMLU_COLUMNS)).to_parquet(buffer)
    return buffer.getvalue()


def answered(body: object, kind: str = "application/json", status: str = "200 OK", head: str = "") -> bytes:
    """A whole answer over HTTP."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(content)}", "Connection: close"]
    return "\r\n".join([*lines, *([head] if head else []), "", ""]).encode() + content


def completion(text: str = "Answer: A") -> dict[str, object]:
    """A chat completion with log-probabilities."""
    tokens = [
        {
            "token": token,
            "logprob": -0.1,
            "top_logprobs": [{"token": token, "logprob": -0.1}, {"token": "x", "logprob": -3.0}],
        }
        for token in re.findall(r" ?[^ ]+", text)
    ]
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 20, "completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": 16}}
    return {"id": "r", "choices": [{**choice, "logprobs": {"content": tokens}}], "usage": usage}


def streamed(tokens: int = 4) -> bytes:
    """A completion as server-sent events."""
    chunks = [
        {
            "id": "s",
            "choices": [{"text": " a", "finish_reason": "length" if number == tokens else None}],
            "usage": {"prompt_tokens": 8, "completion_tokens": number},
        }
        for number in range(1, tokens + 1)
    ]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}
SLOW = "X-Pause-s: 30"
"""A head that the endpoint itself reads: it waits so long before it answers."""
HEADS = (
    "",
    "",
    "",
    SLOW,
    "Retry-After: 20",
    "Location: /v1/models",
    "Content-Encoding: gzip",
    "Transfer-Encoding: chunked",
)
STATUSES = (
    "200 OK",
    "200 OK",
    "200 OK",
    "200 OK",
    "204 No Content",
    "307 Moved",
    "401 Unauthorized",
    "429 Wait",
    "500 No",
)


def endpoint(part: str) -> Callable[[Path], Path]:
    """What an endpoint answers, a file for each address; `part` is mutated, and now and then has another head or status."""

    def make(folder: Path) -> Path:
        (folder / "endpoint").mkdir()
        answers = {"models": MODELS, "chat": completion(), "stream": streamed(), "flush_cache": {}}
        for name, body in answers.items():
            kind = "text/event-stream" if name == "stream" else "application/json"
            odd = name == part and folder.name == "mutated"
            status, head = (random.choice(STATUSES), random.choice(HEADS)) if odd else ("200 OK", "")
            (folder / "endpoint" / f"{name}.http").write_bytes(answered(body, kind, status, head))
        return folder / "endpoint" / f"{part}.http"

    return make


class Endpoint:
    """A server on this machine that sends what the files of a folder have, byte by byte as they are.

    A process of its own answers: one that forks the commands has no threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._process = os.fork()
        if not self._process:
            self._serve()
        self._socket.close()

    def close(self) -> None:
        """End the server."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._answer, args=(self._socket.accept()[0],), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request and (more := connection.recv(1 << 16)):
                request += more
            head, _, body = request.partition(b"\r\n\r\n")
            length = int((re.findall(rb"(?i)content-length: *(\d+)", head) or [b"0"])[0])
            while len(body) < length and (more := connection.recv(1 << 16)):
                body += more
            address = head.split(b" ")[1].decode() if b" " in head else ""
            names = {
                "/v1/models": "models",
                "/v1/chat/completions": "chat",
                "/v1/completions": "stream",
                "/flush_cache": "flush_cache",
            }
            if address not in names:
                connection.sendall(answered({}, status="404 Not Found"))
                return
            with (self._folder / f"{names[address]}.http").open("rb") as file:
                answer = file.read(LONGEST_ANSWER)  # a mutated file may be a link to /dev/zero
            pause_s = float((re.findall(rb"X-Pause-s: (\d{1,3})", answer) or [b"0"])[0])
            time.sleep(min(pause_s, LONGEST_PAUSE_S))
            for event in re.split(rb"(?<=\n\n)", answer) if names[address] == "stream" else [answer]:
                connection.sendall(event)
                time.sleep(0.002 if names[address] == "stream" else 0)


def pack(part: str) -> Callable[[Path], Path]:
    """A replay pack; `part` of it is mutated."""

    def make(folder: Path) -> Path:
        shutil.copytree(packs(), folder / "pack")
        return next((folder / "pack").glob(part))

    return make


@cache
def packs() -> Path:
    """A whole pack; made once, before the workers."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    source = Source(engine="SGLang 0.5.23 on cpu", model="m", model_hash="h", reference="triton")
    writer = PackWriter(place / "pack", source, 1 << 24)
    for sequences in ([(7, 0)], [(4, 20)], [(3, 9), (5, 0)]):
        call = call_of(sequences, (4, 2), 32, torch.float32, "cpu")
        about = CallMetadata(0, "extend", tuple(call.lens_q), tuple(call.prefixes), tuple("r" for _ in call.lens_q))
        if writer.wants(about):
            writer.add(about, call, oracle(call).to(call.q.dtype))
    writer.flush()
    return place / "pack"


def baseline(folder: Path) -> Path:
    """An accepted baseline."""
    key = Key(
        engine="SGLang 0.5.23 on cpu",
        backend="sage_attn",
        model_hash="m" * 64,
        hardware="a machine",
        flags=(),
        items_hash="i",
    )
    server = ServerManifest(
        role="candidate", backend="sage_attn", engine="SGLang 0.5.23 on cpu", claimed_phases=("extend",)
    )
    accepted = Baseline(
        key=key, accepted="2026-01-01T00:00:00Z", run_id="r", git="", numbers={"accuracy": 0.9}, server=server
    )
    return write_baseline(folder / "baselines", accepted, []) / "baseline.json"


def report(name: str) -> Callable[[Path], Path]:
    def content() -> bytes:
        made = runpy.run_path(str(DATA.parent / "stand_ins" / "reports.py"))[name]()
        return to_json(made).encode()

    return written("report.json", content)


LOGS = [copied(f"server_failures/{name}.log") for name in ("architecture", "kernel_raises", "illegal_access", "disk")]
LOGS += [copied(f"sglang_log/{name}") for name in ("kernel_calls.log", "seed.log", "server_0.5.23.log")]
LM_EVAL = "results/lm_eval_a/tiny/"
SAMPLES = "samples_assay_synthetic_2026-11-22T22-18-34.568280.jsonl"
RESULTS = [
    copied(f"{LM_EVAL}{SAMPLES}", "results_2026-11-22T22-18-34.568280.json"),
    copied(f"{LM_EVAL}results_2026-11-22T22-18-34.568280.json", SAMPLES),
    copied("results/inspect_a.json"), copied("results/inspect_a.eval"),
    copied("results/simple_evals_a/gsm8k_tiny.json", "gsm8k_tiny.html"),
    copied("results/simple_evals_a/gsm8k_tiny.html", "gsm8k_tiny.json"),
]  # fmt: skip
TRACES = [copied("traces/mlc_engine.txt")]
TENSORS = [
    written("a.safetensors", safetensors_file), written("a.pt", torch_file), written("a.npz", numpy_file),
    written("a.npy", array_file),
]  # fmt: skip
REPORTS = [report("regression"), report("error")]
CONFIG = b"""[run]
candidate = "sage_attn"
model = "./nowhere"
suites = ["accuracy", "greedy"]
[policy]
margin = 0.02
alpha = 0.05
require = ["kernel-ran"]
"""


def against(*words: str) -> Callable[[Path, Path], list[str]]:
    """The command on a file, or with its whole original: "{whole}"."""
    return lambda path, whole: [word.format(path=path, whole=whole) for word in words]


def of_run(path: Path) -> Path:
    """The folder of a pack in which a file lies."""
    return next(parent for parent in path.parents if parent.name == "pack")


URLS = ("--reference", "{whole}", "--candidate", "{path}")
"""Of endpoints; the paths become addresses once they are served."""
ASKED = (
    "--suites",
    "accuracy,greedy",
    "--questions",
    "8",
    "--greedy-prompts",
    "4",
    "--request-timeout",
    str(ANSWER_S),
    "--out",
    "out",
)
TIMED = (
    "--latency-shapes", "8:4", "--latency-concurrency", "1", "--latency-seconds", "0.1", "--request-timeout", str(ANSWER_S),
    "--out", "out",
)  # fmt: skip
NOBODY = "http://127.0.0.1:9"
"""No server: a command that has read its questions ends here."""


def questions(prefix: str = "") -> Callable[[Path, Path], list[str]]:
    """The command that reads questions, and then finds no server."""
    return lambda path, _: ["run", "--data", f"{prefix}{path}", "--reference", NOBODY, "--candidate", NOBODY, *ASKED]


SERVE = ("openai", "aiohttp")
KERNEL = "assay.harness.attention.sdpa:torch_sdpa"
READERS = (
    Reader("ingest: logs", LOGS, against("ingest", "{path}")),
    Reader("ingest: results", RESULTS, against("ingest", "{path}")),
    Reader("ingest: traces", TRACES, against("ingest", "{path}")),
    Reader("ingest: tensors", TENSORS, against("ingest", "{path}")),
    Reader("ingest: reports", REPORTS, against("ingest", "{path}")),
    Reader("compare: results", RESULTS, against("compare", "{whole}", "{path}")),
    Reader("compare: reports", REPORTS, against("compare", "{whole}", "{path}")),
    Reader("show", REPORTS, against("show", "{path}")),
    Reader("compare: traces", TRACES, against("compare", "{whole}", "{path}")),
    Reader("compare: tensors", TENSORS, against("compare", "{whole}", "{path}")),
    Reader("replay", [pack("manifest.json"), pack("calls/*.safetensors")],
           lambda path, _: ["replay", str(of_run(path)), "--candidate", KERNEL, "--read-out", "0"]),
    Reader("baselines", [baseline], lambda path, _: ["baseline", "list", "--baselines", str(path.parents[1])]),
    Reader("policy", [written("assay.toml", lambda: CONFIG)],
           lambda path, _: ["run", "--config", str(path), "--candidate", "no.such:kernel", "--out", str(path.parent / "out")]),
    Reader("questions: MMLU", [written("a.csv", mmlu_csv), written("a.parquet", mmlu_parquet)], questions(),
           ("openai", "pandas", "pyarrow"), (2, 3)),
    Reader("questions: GSM8K", [copied("results/gsm8k_test.jsonl")], questions("gsm8k:"), SERVE, (2, 3)),
    Reader("endpoints: answers", [endpoint("chat"), endpoint("chat"), endpoint("models"), endpoint("flush_cache")],
           against("run", *URLS, *ASKED), SERVE, (1, 3)),
    Reader("endpoints: streams", [endpoint("stream"), endpoint("stream"), endpoint("models"), endpoint("flush_cache")],
           against("bench", *URLS, *TIMED), SERVE, (0, 1, 3)),
)  # fmt: skip

ODD: list[object] = [
    None, True, -1, 0, 1 << 62, 10**400, 1e308, float("nan"), float("-inf"), "", "\x1b[2J\x1b]0;x\x07", "\ud800", "x" * 5000, [],
    {}, [[[]]], {"a": {"a": {}}}, "9" * 3000, "../../etc/passwd", [None] * 50, {"": None},
]  # fmt: skip
PIECES = [
    b"", b"\x00", b"\xff\xfe", b"\x1b[2J", b"\r", b"\n", b"{", b"[" * 3000, b'{"a":' * 3000, b"9" * 4000, b"nan", b"-1", b"1e999",
    b"null", b'"', b"<", b"&x;", b"]", b" " * 5000, b"%s", b"\xf0\x9f\x98\x80", b"\x80\x02cos\nsystem\n",
]  # fmt: skip


def odd(rng: random.Random) -> object:
    """An odd value: a copy, since the next change may be within it, and would make it hold itself."""
    return copy.deepcopy(rng.choice(ODD))


def changed_json(value: object, rng: random.Random) -> object:
    """JSON in which one to three values are odd ones, lost or doubled."""
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[dict[str, object] | list[object], object]] = []
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                places += [(one, key) for key in one]
                waiting += one.values()
            elif isinstance(one, list):
                places += [(one, index) for index in range(len(one))]
                waiting += one
        if not places:
            return odd(rng)
        holder, key = rng.choice(places)
        if rng.random() < 0.25:
            del holder[key]  # type: ignore[arg-type]
        else:
            holder[key] = odd(rng)  # type: ignore[index, call-overload]
    return value


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one to four places flipped, lost, doubled, cut off or with an odd piece in between."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        to = min(len(found), at + rng.choice((1, 4, 40, 1000)))
        kind = rng.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del found[at:to]
        elif kind == 2:
            found[at:at] = found[at:to] * rng.choice((1, 1, 20))
        elif kind == 3:
            del found[at:]
        else:
            found[at:at] = rng.choice(PIECES)
    return bytes(found)


def mutated(data: bytes, name: str, rng: random.Random) -> bytes:
    """A file's content, mutated: its structure two times of three, where it has one, else its bytes."""
    if rng.random() < 0.33:
        return changed_bytes(data, rng)
    with contextlib.suppress(ValueError, KeyError, zipfile.BadZipFile, OSError, NotImplementedError):
        if name.endswith(".json"):
            return json.dumps(changed_json(json.loads(data), rng)).encode()
        if name.endswith(".jsonl"):
            rows = data.splitlines()
            row = rng.randrange(len(rows))
            rows[row] = json.dumps(changed_json(json.loads(rows[row]), rng)).encode()
            return b"\n".join(rows) + b"\n"
        if name.endswith(".http"):
            return changed_answer(data, rng)
        if name.endswith(".gz"):
            return gzip.compress(mutated(gzip.decompress(data), name.removesuffix(".gz"), rng), mtime=0)
        if name.endswith(".safetensors"):
            end = 8 + int.from_bytes(data[:8], "little")
            header = json.dumps(changed_json(json.loads(data[8:end]), rng)).encode()
            return len(header).to_bytes(8, "little") + header + data[end:]
        if data[:2] == b"PK":
            return changed_zip(data, rng)
    return changed_bytes(data, rng)


def changed_answer(data: bytes, rng: random.Random) -> bytes:
    """An HTTP answer of which the JSON is mutated, or one event's, with the length that it then has."""
    head, _, body = data.partition(b"\r\n\r\n")
    events_ = body.split(b"\n\n")
    number = rng.randrange(len(events_))
    start = b"data: " if events_[number].startswith(b"data: ") else b""
    events_[number] = start + json.dumps(changed_json(json.loads(events_[number].removeprefix(start)), rng)).encode()
    body = b"\n\n".join(events_)
    return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + b"\r\n\r\n" + body


def changed_zip(data: bytes, rng: random.Random) -> bytes:
    """A zip file of which one member is mutated, and that may be packed in another way or be said to be encrypted."""
    buffer, how = (
        io.BytesIO(),
        rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)),
    )
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", how) as new:
        names = old.namelist()
        one = rng.choice(names)
        for name in names:
            content = old.read(name)
            new.writestr(name, mutated(content, name, rng) if name == one else content)
    found = bytearray(buffer.getvalue())
    if rng.random() < 0.3:
        found[found.index(b"PK\x01\x02") + 8] |= 1  # the flag of encryption, in the first entry of the directory
    if rng.random() < 0.3:
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def replace_special(path: Path, rng: random.Random) -> None:
    """A pipe, a device, a folder or a sparse file in place of a file."""
    path.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 36)


def reseal(path: Path) -> None:
    """Have a pack's manifest name the hash of a call that was mutated, so that what is behind the hash is read too."""
    manifest = path.parents[1] / "manifest.json"
    document = json.loads(manifest.read_text())
    for entry in document["calls"]:
        if entry["file"].endswith(path.name):
            content = path.read_bytes()
            entry.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    manifest.write_text(json.dumps(document))


def prepared(reader: Reader, seed: int, folder: Path) -> list[str]:
    """Make the input of a seed in a folder, and return the command that reads it."""
    rng = random.Random(f"{reader.name} {seed}")
    random.seed(seed)
    make = reader.seeds[seed % len(reader.seeds)]
    (folder / "whole").mkdir()
    (folder / "mutated").mkdir()
    whole = make(folder / "whole")
    random.seed(seed)
    path = make(folder / "mutated")
    if rng.random() < 0.01:
        replace_special(path, rng)
    else:
        path.write_bytes(mutated(path.read_bytes(), path.name, rng))
        if path.parent.name == "calls" and rng.random() < 0.7:
            reseal(path)
    if rng.random() < 0.02 and not reader.name.startswith(("replay", "endpoints")):
        path = path.rename(path.with_name(f"\x1b[2J{path.name}"))
    return reader.command(path, whole)


def child(words: list[str], output: Path) -> None:
    """In a process of its own: run the command, and end with its exit code."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + (MEMORY_GB << 30),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(output.parent)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = ["assay", *words]
    code: object = UNCAUGHT
    try:
        cli.main()
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else UNCAUGHT)


@contextlib.contextmanager
def served(words: list[str]) -> Iterator[list[str]]:
    """The words of a command, with the addresses of endpoints in place of their files."""
    running: list[Endpoint] = []
    try:
        found = []
        for word in words:
            if word.endswith(".http"):
                running.append(Endpoint(Path(word).parent))
                word = running[-1].url
            found.append(word)
        yield found
    finally:
        for one in running:
            one.close()


def judged(reader: Reader, seed: int, out: Path | None = None, keep: bool = False) -> tuple[str, str]:
    """What is wrong with how an input was read, and where; "" and how it ended if nothing is.

    Args:
        reader: what reads it.
        seed: of the input.
        out: where an input with a fault is kept.
        keep: whether one without is kept too.
    """
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        words = prepared(reader, seed, folder)
        with served(words) as said:
            fault = ended(reader, said, folder)
        if out and (keep or fault[0]):
            kept = out / (fault[0] or "right").replace(" ", "-") / f"{re.sub('[^a-zA-Z0-9]+', '-', reader.name)}-{seed}"
            shutil.copytree(folder, kept, symlinks=True, ignore=irregular, dirs_exist_ok=True)
            (kept / "fault").write_text(f"assay {shlex.join(words)}\n{fault[0]}: {fault[1]}\n", errors="replace")
        return fault
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def irregular(folder: str, names: list[str]) -> list[str]:
    """Files that are not copied: pipes, and sparse ones of many GB."""
    paths = {name: Path(folder) / name for name in names}
    return [
        name
        for name, path in paths.items()
        if not path.is_symlink() and (path.is_fifo() or path.stat().st_size > 1 << 30)
    ]


def ended(reader: Reader, words: list[str], folder: Path) -> tuple[str, str]:
    """Run a command in a process of its own, and say what is wrong with its end."""
    began, process = time.monotonic(), os.fork()
    if not process:
        child(words, folder / "output")
    done, status, used = os.wait4(process, os.WNOHANG)
    while not done and time.monotonic() - began < hang_s():
        time.sleep(0.005)
        done, status, used = os.wait4(process, os.WNOHANG)
    if not done:
        os.kill(process, signal.SIGKILL)
        _, _, used = os.wait4(process, 0)
        return "hang", f"more than {HANG_S} s, {used.ru_utime + used.ru_stime:.0f} of CPU"
    said = (folder / "output").read_text(errors="replace")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return fault_of(os.waitstatus_to_exitcode(status), (used.ru_maxrss - own) >> 10, said, reader.codes)


def hang_s() -> float:
    """Seconds after which an input is a hang: as much longer as processes wait for a core."""
    return HANG_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def fault_of(code: int, peak_mb: int, said: str, codes: Sequence[int]) -> tuple[str, str]:
    """The first fault of an end: its kind, and where or what; "" and the exit code if there is none, with the type of the
    exception that a reader's door took for damage.
    """
    if code < 0:
        return "wrong exit code", signal.Signals(-code).name
    if "assay: this is a bug in assay" in said or code == UNCAUGHT:  # a log may quote a traceback
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        places = [line for line in lines if line.startswith("File ") and "/harness/" in line]
        raised = next(
            (line for line in reversed(lines) if "Error" in line and not line.startswith("assay:")), lines[-1]
        )
        place = places[-1].rpartition("/harness/")[2] if places else ""
        return "traceback", f"{place}: {raised[:100]}"
    if code not in codes or (code in (0, 1) and "\nassay: " in f"\n{said}"):
        return "wrong exit code", f"{code}: {said[-100:]!r}"
    if "\x1b" in said:
        return "escape", repr(said[max(said.index("\x1b") - 40, 0) :][:100])
    if peak_mb > PEAK_MB:
        return "memory", f"{peak_mb} MB"
    at_door = re.search(r"is not a whole [^:]{1,60}:\s(\w+(?:Error|Exception))\b", said)
    return "", f"{code} {at_door[1]}" if at_door else str(code)


def work(inputs: Sequence[tuple[Reader, int]], until: float, results: Path, out: Path | None) -> None:
    """One of several workers: its share of the inputs, a line each, until the monotonic clock says `until`."""
    with results.open("w") as file:
        for reader, seed in inputs:
            if time.monotonic() > until:
                break
            print(json.dumps([reader.name, seed, *judged(reader, seed, out)]), file=file, flush=True)


def make_ready() -> None:
    """Make what the commands would make again for each input, before the processes are forked that run them.

    Without it an input takes three times as long: most of that are imports, options that Typer reads off signatures, certificates
    that no address here needs, and the pages that a garbage collection in a forked process copies.
    """
    torch.set_num_threads(1)
    nothing = packs().parent / "certificates"
    nothing.mkdir()
    # before what reads them is imported
    os.environ.update(HF_HOME=str(packs().parent / "cache"), HF_HUB_OFFLINE="1", SSL_CERT_DIR=str(nothing))
    commands = importlib.import_module("assay.harness.cli.app")  # the package has the application by that name
    commands.load_command = cache(commands.load_command)
    for name in COMMANDS_USED:
        commands.load_command(name)
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(cli.app)
    for name in IMPORTED_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for package in (evals, bench, collect, ingest, judge, offline, reports):  # what commands import when they run
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    to_html(run_document(runpy.run_path(str(DATA.parent / "stand_ins" / "reports.py"))["regression"]()))
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run, print, and say whether there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no input is begun later")
    parser.add_argument("--out", type=Path, default=None, help="a folder for the inputs with a fault")
    parser.add_argument("--only", default="", help="readers whose name begins so")
    parser.add_argument("--first", type=int, default=0, help="the seed of each reader's first input")
    parser.add_argument("--seed", type=int, default=None, help="only this input of each reader, with its output")
    given = parser.parse_args()
    readers = []
    for one in READERS:
        lacking = [name for name in one.needs if not find_spec(name)]
        if lacking:
            print(f"{one.name}: not read, since {', '.join(lacking)} is not installed")
        elif one.name.startswith(given.only):
            readers.append(one)
    make_ready()
    if given.seed is not None:
        for reader in readers:
            folder = given.out or Path(tempfile.mkdtemp(prefix=f"fuzz-{given.seed}-"))
            fault = judged(reader, given.seed, folder, keep=True)
            print(f"{reader.name}: {fault}, kept in {folder}")
        return 0
    began = time.monotonic()
    until = began + 60 * given.minutes
    seeds = range(given.first, given.first + -(-given.inputs // len(readers)))
    inputs = [(reader, seed) for seed in seeds for reader in readers][: given.inputs]
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / str(number) for number in range(given.processes)]
        workers = [
            get_context("fork").Process(target=work, args=(inputs[number :: given.processes], until, file, given.out))
            for number, file in enumerate(files)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    shutil.rmtree(packs().parent)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = show(readers, rows)
    print(
        f"{len(rows):,} of {len(inputs):,} inputs in {time.monotonic() - began:,.0f} s, "
        f"{(used.ru_utime + used.ru_stime) / max(1, len(rows)):.2f} s of CPU each"
    )
    failed = [str(worker.exitcode) for worker in workers if worker.exitcode]
    if failed:
        print(f"{len(failed)} workers failed, with exit codes {', '.join(failed)}: their other inputs were not read")
    return code or int(bool(failed))


def show(readers: Sequence[Reader], rows: Sequence[list[object]]) -> int:
    """Print the table, and each fault once. Returns whether there is one."""
    kinds = ("traceback", "hang", "wrong exit code", "escape", "memory")
    print(f"{'reader':22}{'inputs':>8}" + "".join(f"{kind:>17}" for kind in kinds) + "   exit codes 0, 1, 2, 3")
    for name in [reader.name for reader in readers] + ["all"]:
        own = [row for row in rows if name in (row[0], "all")]
        counts = Counter(str(row[2]) for row in own)
        codes = Counter(str(row[3])[0] for row in own if not row[2])
        ended = ", ".join(str(codes[code]) for code in "0123")
        doors = Counter(str(row[3])[2:] for row in own if not row[2] and str(row[3])[2:])
        ended += (
            f"; at the door {', '.join(f'{type_} {number}' for type_, number in doors.most_common())}" if doors else ""
        )
        print(f"{name:22}{len(own):8,}" + "".join(f"{counts[kind]:17,}" for kind in kinds) + f"   {ended}")
    faults: dict[tuple[object, object], list[list[object]]] = defaultdict(list)
    for row in rows:
        if row[2]:
            faults[row[2], row[3]].append(row)
    for (kind, where), found in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):5} {kind}: {where}  (--only {found[0][0]!r} --seed {found[0][1]})")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
