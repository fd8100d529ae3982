"""Mutated files through every reader: tracebacks, hangs, wrong exit codes, and escape sequences that reach the terminal.

``nice python benchmarks/fuzz.py --inputs 10000 --processes 16`` mutates small whole files, which it makes itself or takes from
tests/, and runs the command that reads each kind: in a process of its own, forked with everything imported, with a limit of memory
and one of time. It prints a row per reader, and every fault once with the seed that makes its input again
(``--only READER --seed N``). The exit code is 1 if there is any fault.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from assay import reports
from assay.harness import cli, ingest, judge, offline
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.cli.app import load_command
from assay.harness.evidence.baseline import Baseline, Key, write_baseline
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.pack import CallMetadata, Source
from assay.harness.ingest.tensors.flashinfer_trace import export_pack
from assay.harness.server.pack_writer import PackWriter

COMMANDS_USED = ("ingest", "verify-claim", "compare", "show", "trace", "tensors", "pack", "replay", "run", "baseline")
DATA = Path(__file__).parents[1] / "tests" / "data"
MEMORY_GB = 16
"""Address space of a worker: most of it is that of libraries."""
PEAK_MB = 1_500
"""Memory above which a small input is a fault: of a worker, with its libraries."""
UNCAUGHT = 70
"""Exit code of an input whose exception left the command."""
HANG_S = 20
"""Seconds after which an input is a hang; the slowest whole seed takes about one."""


@dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Attributes:
        name: of the row.
        seeds: makes whole files in a folder, and returns the one that is mutated; several are drawn in turn.
        command: the words behind ``assay``, of the mutated path and its whole original.
    """

    name: str
    seeds: Sequence[Callable[[Path], Path]]
    command: Callable[[Path, Path], list[str]]


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


def events() -> bytes:
    spans = [
        {
            "ph": "X",
            "name": f"step[DECODE bs={n}]",
            "cat": "user_annotation",
            "ts": 10 * n,
            "dur": 8,
            "pid": 1,
            "tid": 1,
            "args": {},
        }
        for n in range(12)
    ]
    return json.dumps({"schemaVersion": 1, "traceEvents": spans}).encode()


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


def pack(part: str) -> Callable[[Path], Path]:
    """A replay pack; `part` of it is mutated."""

    def make(folder: Path) -> Path:
        shutil.copytree(packs(), folder / "pack")
        return next((folder / "pack").glob(part))

    return make


def trace(part: str) -> Callable[[Path], Path]:
    """A FlashInfer Trace of the pack."""

    def make(folder: Path) -> Path:
        shutil.copytree(packs().parent / "trace", folder / "trace")
        return next((folder / "trace").rglob(part))

    return make


@cache
def packs() -> Path:
    """A whole pack, and beside it the same as a FlashInfer Trace; made once, before the workers."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    source = Source(engine="SGLang 0.5.23 on cpu", model="m", model_hash="h", reference="triton")
    writer = PackWriter(place / "pack", source, 1 << 24)
    for sequences in ([(7, 0)], [(4, 20)], [(3, 9), (5, 0)]):
        call = call_of(sequences, (4, 2), 32, torch.float32, "cpu")
        about = CallMetadata(0, "extend", tuple(call.lens_q), tuple(call.prefixes), tuple("r" for _ in call.lens_q))
        if writer.wants(about):
            writer.add(about, call, oracle(call).to(call.q.dtype))
    writer.flush()
    export_pack(place / "pack", place / "trace")
    return place / "pack"


def dumped(folder: Path) -> Path:
    """A call of SGLang's kernel API as the tests have it."""
    shutil.copytree(DATA / "tensors" / "flashinfer", folder / "dump")
    return random.choice(sorted(one for one in (folder / "dump").rglob("*") if one.is_file()))


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
    return copied(f"report-v1/{name}.json")


LOGS = [copied(f"server_failures/{name}.log") for name in ("architecture", "kernel_raises", "illegal_access", "disk")]
LOGS += [copied(f"sglang_log/{name}") for name in ("kernel_calls.log", "seed.log", "server_0.5.23.log")]
TEXTS = [copied(f"any_log/{name}.txt") for name in ("llama_cpp", "scores", "tensorrt_llm", "vllm")]
LM_EVAL = "results/lm_eval_a/tiny/"
RESULTS = [
    copied(f"{LM_EVAL}results_2026-11-22T22-18-34.568280.json", "samples_assay_synthetic_2026-11-22T22-18-34.568280.jsonl"),
    copied("results/sgl_eval_a/metrics.json", "output-rs0.jsonl"), copied("results/sgl_eval_a/output-rs0.jsonl", "metrics.json"),
    copied("results/inspect_a.json"), copied("results/inspect_a.eval"), copied("results/serving_a.jsonl"),
    copied("results/junit_a.xml"), copied("results/simple_evals_a/gsm8k_tiny.json", "gsm8k_tiny.html"),
    copied("results/simple_evals_a/gsm8k_tiny.html", "gsm8k_tiny.json"),
]  # fmt: skip
TRACES = [
    written("events.json", events), written("events.json.gz", lambda: gzip.compress(events(), mtime=0)),
    copied("traces/mlc_events.json"), copied("traces/mlc_engine.txt"),
]  # fmt: skip
TENSORS = [
    written("a.safetensors", safetensors_file), written("a.pt", torch_file), written("a.npz", numpy_file),
    written("a.npy", array_file),
]  # fmt: skip
REPORTS = [report("regression"), report("error")]
CONFIG = b"""[run]
candidate = "sage_attn"
model = "./nowhere"
suites = ["mmlu", "greedy"]
[policy]
margin = 0.02
alpha = 0.05
require = ["kernel-ran"]
"""


def against(*words: str) -> Callable[[Path, Path], list[str]]:
    """The command on a file, or with its whole original: "{whole}"."""
    return lambda path, whole: [word.format(path=path, whole=whole) for word in words]


def of_run(path: Path) -> Path:
    """The folder of a pack, a trace or a dump in which a file lies."""
    return next(parent for parent in path.parents if parent.name in ("pack", "trace", "dump"))


def imported(path: Path, _: Path) -> list[str]:
    """The command that makes a pack of a dump or a trace."""
    return ["pack", "import", str(of_run(path)), "--out", str(of_run(path).parent / "made")]


KERNEL = "assay.harness.attention.sdpa:torch_sdpa"
READERS = (
    Reader("ingest: logs", LOGS, against("ingest", "{path}")),
    Reader("ingest: any text", TEXTS, against("ingest", "{path}")),
    Reader("ingest: results", RESULTS, against("ingest", "{path}")),
    Reader("ingest: traces", TRACES, against("ingest", "{path}")),
    Reader("ingest: tensors", TENSORS, against("ingest", "{path}")),
    Reader("ingest: reports", REPORTS, against("ingest", "{path}")),
    Reader("verify-claim", [*LOGS, *RESULTS], against("verify-claim", "{path}", "--says", "MMLU >= 0.6, all tests passed")),
    Reader("compare: results", RESULTS, against("compare", "{whole}", "{path}")),
    Reader("compare: reports", REPORTS, against("compare", "{whole}", "{path}")),
    Reader("show", REPORTS, against("show", "{path}")),
    Reader("trace diff", TRACES, against("trace", "diff", "{whole}", "{path}")),
    Reader("tensors diff", TENSORS, against("tensors", "diff", "{whole}", "{path}")),
    Reader("tensors diff: dumps", [dumped], lambda path, whole: ["tensors", "diff", str(of_run(whole)), str(of_run(path))]),
    Reader("pack import: dump", [dumped], imported),
    Reader("pack import: trace", [trace("*.json"), trace("*.jsonl"), trace("*.safetensors")],
           imported),
    Reader("pack export", [pack("manifest.json"), pack("calls/*.safetensors")],
           lambda path, _: ["pack", "export", str(of_run(path)), "--flashinfer-trace", str(of_run(path).parent / "made")]),
    Reader("replay", [pack("manifest.json"), pack("calls/*.safetensors")],
           lambda path, _: ["replay", str(of_run(path)), "--candidate", KERNEL, "--read-out", "0"]),
    Reader("baselines", [baseline], lambda path, _: ["baseline", "list", "--baselines", str(path.parents[1])]),
    Reader("policy", [written("assay.toml", lambda: CONFIG)],
           lambda path, _: ["run", "--config", str(path), "--candidate", "no.such:kernel", "--out", str(path.parent / "out")]),
)  # fmt: skip

ODD: list[object] = [
    None, True, -1, 0, 1 << 62, 10**400, 1e308, float("nan"), float("-inf"), "", "\x1b[2J\x1b]0;x\x07", "\ud800", "x" * 5000, [],
    {}, [[[]]], {"a": {"a": {}}}, "9" * 3000, "../../etc/passwd", [None] * 50, {"": None},
]  # fmt: skip
PIECES = [
    b"", b"\x00", b"\xff\xfe", b"\x1b[2J", b"\r", b"\n", b"{", b"[" * 3000, b'{"a":' * 3000, b"9" * 4000, b"nan", b"-1", b"1e999",
    b"null", b'"', b"<", b"&x;", b"]", b" " * 5000, b"%s", b"\xf0\x9f\x98\x80", b"\x80\x02cos\nsystem\n",
]  # fmt: skip


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
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        if rng.random() < 0.25:
            del holder[key]  # type: ignore[arg-type]
        else:
            holder[key] = rng.choice(ODD)  # type: ignore[index, call-overload]
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
        if name.endswith(".gz"):
            return gzip.compress(mutated(gzip.decompress(data), name.removesuffix(".gz"), rng), mtime=0)
        if name.endswith(".safetensors"):
            end = 8 + int.from_bytes(data[:8], "little")
            header = json.dumps(changed_json(json.loads(data[8:end]), rng)).encode()
            return len(header).to_bytes(8, "little") + header + data[end:]
        if data[:2] == b"PK":
            return changed_zip(data, rng)
    return changed_bytes(data, rng)


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
    if rng.random() < 0.02 and not reader.name.startswith(("pack", "replay", "tensors diff: dumps")):
        path = path.rename(path.with_name(f"\x1b[2J{path.name}"))
    return reader.command(path, whole)


def child(words: list[str], output: Path) -> None:
    """In a process of its own: run the command, and end with its exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GB << 30, MEMORY_GB << 30))
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


def judged(reader: Reader, seed: int) -> tuple[str, str]:
    """What is wrong with how an input was read, and where; "" and its exit code if nothing is."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        words = prepared(reader, seed, folder)
        began, process = time.monotonic(), os.fork()
        if not process:
            child(words, folder / "output")
        done, status, used = os.wait4(process, os.WNOHANG)
        while not done and time.monotonic() - began < HANG_S:
            time.sleep(0.005)
            done, status, used = os.wait4(process, os.WNOHANG)
        if not done:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "hang", f"more than {HANG_S} s"
        said = (folder / "output").read_text(errors="replace")
        return fault_of(os.waitstatus_to_exitcode(status), used.ru_maxrss >> 10, said)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fault_of(code: int, peak_mb: int, said: str) -> tuple[str, str]:
    """The first fault of an end: its kind, and where or what."""
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
    if code not in (0, 1, 2, 3) or (code in (0, 1) and "\nassay: " in f"\n{said}"):
        return "wrong exit code", f"{code}: {said[-100:]!r}"
    if "\x1b" in said:
        return "escape", repr(said[max(said.index("\x1b") - 40, 0) :][:100])
    if peak_mb > PEAK_MB:
        return "memory", f"{peak_mb} MB"
    return "", str(code)


def work(number: int, of: int, inputs: int, readers: Sequence[Reader], results: Path) -> None:
    """One of several workers: its share of the inputs, a line each."""
    with results.open("w") as file:
        for index in range(number, inputs, of):
            reader = readers[index % len(readers)]
            seed = index // len(readers)
            print(json.dumps([reader.name, seed, *judged(reader, seed)]), file=file, flush=True)


def main() -> int:
    """Run, print, and say whether there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="readers whose name begins so")
    parser.add_argument("--seed", type=int, default=None, help="only this input of each reader, with its output kept")
    given = parser.parse_args()
    readers = [one for one in READERS if one.name.startswith(given.only)]
    torch.set_num_threads(1)
    packs()
    for name in COMMANDS_USED:
        load_command(name)
    for package in (ingest, judge, offline, reports):  # what commands import when they run
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(one.name)
    if given.seed is not None:
        for reader in readers:
            folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{given.seed}-"))
            print(
                f"{reader.name}: assay {shlex.join(prepared(reader, given.seed, folder))}\n  {judged(reader, given.seed)}"
            )
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / str(number) for number in range(given.processes)]
        workers = [
            get_context("fork").Process(target=work, args=(number, given.processes, given.inputs, readers, file))
            for number, file in enumerate(files)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    shutil.rmtree(packs().parent)
    return show(readers, rows, time.monotonic() - began)


def show(readers: Sequence[Reader], rows: Sequence[list[object]], seconds: float) -> int:
    """Print the table, and each fault once."""
    kinds = ("traceback", "hang", "wrong exit code", "escape", "memory")
    print(f"{'reader':22}{'inputs':>8}" + "".join(f"{kind:>17}" for kind in kinds) + "   exit codes 0, 1, 2, 3")
    for name in [reader.name for reader in readers] + ["all"]:
        own = [row for row in rows if name in (row[0], "all")]
        counts = Counter(str(row[2]) for row in own)
        codes = Counter(str(row[3]) for row in own if not row[2])
        ended = ", ".join(str(codes[code]) for code in "0123")
        print(f"{name:22}{len(own):8,}" + "".join(f"{counts[kind]:17,}" for kind in kinds) + f"   {ended}")
    faults: dict[tuple[object, object], list[list[object]]] = defaultdict(list)
    for row in rows:
        if row[2]:
            faults[row[2], row[3]].append(row)
    for (kind, where), found in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):5} {kind}: {where}  (--only {found[0][0]!r} --seed {found[0][1]})")
    print(f"{len(rows):,} inputs in {seconds:,.0f} s")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
