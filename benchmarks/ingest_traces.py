"""How much of a trace is understood, what damage does to it, and how fast it is read.

    python benchmarks/ingest_traces.py ENGINE_TRACE

Prints, with the time and the peak memory of each:

- lines understood of lines, requests and findings of an engine trace of MLC-LLM;
- 200 damaged copies of it (cut, with lines missing, repeated or from a second copy, CRLF, UTF-16, bytes that are not UTF-8, noise):
  crashes, and counts that differ from those of regular expressions on the same copy;
- 200 damaged copies of each profile in ``tests/data/traces`` (cut, compressed, events lost, repeated or out of order, CRLF, bytes
  put in): crashes, and counts of events that cannot be right;
- the speed on 100 MB of each kind: lines of an engine, and Chrome trace events as PyTorch's profiler writes them, also compressed;
- the comparison of both with a copy of which one line, or one kernel, is another.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.trace import mlc_engine
from assay.harness.ingest.trace.mlc_engine import tokens
from assay.harness.ingest.trace.trace_diff import diff_files, document_of

PROFILE = Path(__file__).parents[1] / "tests" / "data" / "traces" / "h100_flash.json.gz"
COPIES, MEGABYTES = 200, 100
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "cp1252")


def damaged(text: str, rng: random.Random) -> tuple[bytes, str]:
    """A damaged copy as bytes, and as the text that a right reader makes of it."""
    lines = text.split("\n")
    for kind in rng.sample(["cut", "drop", "repeat", "interleave", "noise"], rng.randrange(1, 3)):
        at = rng.randrange(len(lines))
        if kind == "cut":
            lines = lines[: at + 1]
        elif kind == "drop":
            lines = [line for line in lines if rng.random() > 0.02]
        elif kind == "repeat":
            lines[at:at] = lines[at : at + rng.randrange(1, 200)]
        elif kind == "interleave":
            other = iter(text.split("\n"))
            lines = [one for line in lines for one in ((line, next(other)) if rng.random() < 0.3 else (line,))]
        else:
            lines = [one for line in lines for one in ((line, noise(rng)) if rng.random() < 0.05 else (line,))]
    copy = "\n".join(lines)
    encoding = rng.choice(ENCODINGS)
    data = copy.replace("\n", rng.choice(["\n", "\r\n"])).encode(encoding, "replace")
    return data, copy


def noise(rng: random.Random) -> str:
    """A line that belongs to no engine trace."""
    return "[engine debug] " * rng.randrange(2) + "".join(chr(rng.choice([233, *range(97, 123)])) for _ in range(12))


def wrong_counts(path: Path, text: str) -> list[str]:
    """Counts of a copy that differ from those of regular expressions, which share no code with the reader."""
    found = mlc_engine.READER.steps(SourceFile.of(path))
    steps = [step for segment in found.segments for step in segment.steps]
    mlc_engine.READER.read(SourceFile.of(path))
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    added = [i for i, line in enumerate(lines) if line == "[engine debug] ***Add Request***"]
    reloads = [i for i, line in enumerate(lines) if line == "[engine debug] ***Reload engine***"]
    sampled = sum(
        line == "[engine debug] gpu_multinomial_from_uniform_func_"
        and max((one for one in added if one < i), default=-1) > max((one for one in reloads if one < i), default=-1)
        for i, line in enumerate(lines)
    )
    expected = {
        "lines": (found.file.lines, len(lines)),
        "read + unread": (found.file.read + found.file.unread, len(lines)),
        "requests": (len(found.tracks), len(added)),
        "tokens": (sum(sum(tokens(track)) for track in found.tracks), sampled),
        "actions": (sum(step.kind == "action" for step in steps), len(re.findall(r"(?m)^\[engine debug\] ACTION - ", text))),
        "segments": (sum(step.name == "segment begins" for step in steps), len(re.findall(r"(?m)^PRE[_ ]SEGMENT$", text))),
    }  # fmt: skip
    return [f"{name}: {got}, not {right}" for name, (got, right) in expected.items() if got != right]


def large_engine_trace(text: str) -> str:
    """About 100 MB of requests, each as in the trace."""
    return text * (MEGABYTES * 1_000_000 // len(text.encode()))


def large_profile() -> str:
    """About 100 MB of a real profile, repeated at later times and with other correlations."""
    whole = json.loads(gzip.decompress(PROFILE.read_bytes()))
    events = whole.pop("traceEvents")
    times = [one["ts"] for one in events if "ts" in one]
    length = max(times) - min(times) + 1_000
    parts, size, copy = [], 0, 0
    while size < MEGABYTES * 1_000_000:
        for one in events:
            args = dict(one.get("args", {}))
            if "correlation" in args:
                args["correlation"] += copy * 10_000_000
            moved = {**one, "ts": one["ts"] + copy * length, "args": args} if "ts" in one else one
            parts.append(json.dumps(moved, indent=2))
            size += len(parts[-1]) + 2
        copy += 1
    return json.dumps(whole)[:-1] + ', "traceEvents": [\n' + ",\n".join(parts) + "\n]}"


def measured(name: str, path: Path, *also: Path) -> None:
    """Read a file, or compare two, in a process of its own, and print the time, the speed and the memory."""
    command = [sys.executable, __file__, "--one", str(path), *map(str, also)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    says = json.loads(done.stdout.splitlines()[-1])
    size = sum(one.stat().st_size for one in (path, *also)) / 1e6
    speed = f"{size / says['seconds']:.1f} MB/s"
    print(
        f"{name}: {size:,.0f} MB in {says['seconds']:.1f} s, {speed}, {says['megabytes']:,.0f} MB of memory; {says['found']}"
    )


def one(paths: list[Path]) -> None:
    """Read one file or compare two in this process."""
    started = time.perf_counter()
    if len(paths) == 2:
        found = diff_files(*paths).headline
    else:
        file = document_of(paths[0]).file
        found = f"{file.read:,} of {file.lines:,} {file.unit}s understood"
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"seconds": seconds, "megabytes": memory, "found": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="+")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.trace)
        return
    text = given.trace[0].read_text()
    document = document_of(given.trace[0])
    facts = "; ".join(fact.text for fact in document.facts if not fact.id.endswith("-output"))
    print(
        f"{document.file.read:,} of {document.file.lines:,} lines understood, {len(document.findings)} findings: {facts}"
    )
    with tempfile.TemporaryDirectory() as folder:
        damage(text, Path(folder))
        damage_profiles(Path(folder))
        speed(text, Path(folder))


def damage(text: str, folder: Path) -> None:
    """Read the damaged copies."""
    crashes, wrong, started = 0, 0, time.perf_counter()
    for seed in range(COPIES):
        data, copy = damaged(text, random.Random(seed))
        path = folder / "copy.txt"
        path.write_bytes(data)
        try:
            differ = wrong_counts(path, copy)
        except Exception as error:
            crashes += 1
            print(f"  copy {seed}: {type(error).__name__}: {error}")
            continue
        wrong += bool(differ)
        if differ:
            print(f"  copy {seed}: {'; '.join(differ)}")
    print(
        f"{COPIES} damaged copies in {time.perf_counter() - started:.1f} s: {crashes} crashes, {wrong} with a wrong count"
    )


def damaged_rows(rows: list[str], rng: random.Random) -> tuple[bytes, int, int]:
    """Events, a row each, as a damaged file; how many are whole in it, and how many were touched."""
    rows = list(rows)
    kind = rng.choice(["cut", "drop", "repeat", "shuffle", "bytes"])
    touched = 0
    if kind == "drop":
        rows = [row for row in rows if rng.random() > 0.02]
    elif kind == "repeat":
        at = rng.randrange(len(rows))
        rows[at:at] = rows[at : at + rng.randrange(1, 200)]
    elif kind == "shuffle":
        rng.shuffle(rows)
    data = [row.encode() for row in rows]
    if kind == "bytes":
        hit = sorted(rng.sample(range(len(data)), rng.randrange(1, 30)))
        touched = len(hit)
        for index in hit:
            at = rng.randrange(1, len(data[index]))
            data[index] = (
                data[index][:at] + rng.choice([b"\0", b"\xff", b'"', b"}", b"{", b",", b"]"]) + data[index][at:]
            )
    if kind == "cut":
        data = data[: rng.randrange(2, len(data))]
        touched = 1
        data[-1] = data[-1][: rng.randrange(1, len(data[-1]))]
    end = b"" if kind == "cut" else b"]"
    whole = b"[" + rng.choice([b",", b",\n", b",\r\n"]).join(data) + end
    if rng.random() < 0.3:
        whole = gzip.compress(whole, 1)
    return whole, len(data) - touched, touched


def damage_profiles(folder: Path) -> None:
    """Read damaged copies of each real profile."""
    for path in sorted(PROFILE.parent.glob("*.json*")):
        text = path.read_bytes()
        found = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
        rows = [json.dumps(one) for one in (found["traceEvents"] if isinstance(found, dict) else found)]
        copy, crashes, wrong = folder / "copy.json", 0, 0
        for seed in range(COPIES):
            data, whole, touched = damaged_rows(rows, random.Random(seed))
            copy.write_bytes(data)
            try:
                file = document_of(copy).file
            except Exception as error:
                crashes += 1
                print(f"  copy {seed}: {type(error).__name__}: {error}")
                continue
            right = whole <= file.read <= whole + touched and file.read + file.unread == file.lines
            wrong += not right
            if not right:
                print(f"  copy {seed}: {file.read} events read, {whole} are whole, {touched} were touched")
        print(
            f"{path.name}, {len(rows):,} events: {COPIES} damaged copies: {crashes} crashes, {wrong} with a wrong count"
        )


def speed(text: str, folder: Path) -> None:
    """Read and compare 100 MB of each kind."""
    makers: dict[str, tuple[Callable[[], str], str, str]] = {
        "engine.txt": (lambda: large_engine_trace(text), "kv_cache_fork_sequence_func_", "kv_cache_add_sequence_func_"),
        "profile.json": (large_profile, "flash_fwd_kernel", "other_kernel"),
    }
    for name, (make, old, new) in makers.items():
        whole, path, edited = make(), folder / name, folder / f"edited-{name}"
        path.write_text(whole)
        at = whole.index(old, len(whole) // 2)
        edited.write_text(whole[:at] + new + whole[at + len(old) :])
        measured(name, path)
        measured(f"{name} and a copy with one difference", path, edited)
        if name.endswith(".json"):
            packed = folder / f"{name}.gz"
            packed.write_bytes(gzip.compress(whole.encode(), 6))
            measured(packed.name, packed)


if __name__ == "__main__":
    main()
