"""Mutated copies of logs, and a long one: does `assay ingest` crash, does it count wrong, and how fast is it?

    python benchmarks/ingest_logs.py LOG... [--copies 200] [--megabytes 100] [--seed 0]

Each copy is truncated at a byte, interleaved with another log, given CRLF line ends, written in another encoding, or has NUL bytes
and bytes of another encoding put in. The right count is not taken from the reader: it comes from the lines of the original with a
plain regular expression, and from which of them the mutation touched. A line that was touched may count as it was, or not at all.

A log is any file that a reader takes. Counts are compared for SGLang and pytest logs; of other files, that no line is lost.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from assay.harness.ingest.recognise import UNKNOWN, ingest
from assay.harness.ingest.sglang_log.reader import read_log
from assay.harness.ingest.source_file import SourceFile

PATTERNS = {
    "prefill": re.compile(r"Prefill batch.{0,8} #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+),"),
    "decode": re.compile(r"Decode batch.{0,8} #running-req: (\d+),"),
    "metric": re.compile(r"^\[METRIC\] \S+=\S+"),
    "server": re.compile(r"server_args=(?:ServerArgs\(|\{)"),
    "outcome": re.compile(r"^(?:PASSED|FAILED)$"),
}
Mutation = tuple[bytes, list[str], list[str]]
"""The bytes, the lines of the original that are whole in them, and those that were touched."""


def truth(lines: list[str]) -> Counter[str]:
    """What lines say, by a plain search in each of them."""
    counts: Counter[str] = Counter()
    for line in lines:
        for name, pattern in PATTERNS.items():
            match = pattern.search(line)
            if match:
                counts[name] += 1
                if name == "prefill":
                    counts["new tokens"] += int(match[2])
                    counts["cached tokens"] += int(match[3])
    return counts


def counted(path: Path) -> Counter[str]:
    """What the reader counts."""
    log = read_log(SourceFile.of(path).lines())
    return Counter(
        {
            "prefill": log.kinds["prefill"],
            "decode": log.kinds["decode"],
            "metric": log.kinds["metric"],
            "server": len([one for one in log.servers if one.arguments or not one.whole]),
            "outcome": log.outcomes["passed"] + log.outcomes["failed"],
            "new tokens": sum(one.new_tokens for one in log.servers),
            "cached tokens": sum(one.cached_tokens for one in log.servers),
        }
    )


def lines_of(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").split("\n")


def truncated(data: bytes, other: bytes, draw: random.Random) -> Mutation:
    kept = data[: draw.randrange(len(data))]
    whole, _, rest = kept.rpartition(b"\n")
    last = data[len(whole) + 1 if whole else 0 :].partition(b"\n")[0]
    return kept, lines_of(whole), [last.decode("utf-8", "replace")] if rest else []


def interleaved(data: bytes, other: bytes, draw: random.Random) -> Mutation:
    sides = [data.split(b"\n")[::-1], other.split(b"\n")[::-1]]
    mixed = []
    while any(sides):
        side = draw.choice([one for one in sides if one])
        mixed.append(side.pop())
    whole = b"\n".join(mixed)
    return whole, lines_of(whole), []


def carriage_returns(data: bytes, other: bytes, draw: random.Random) -> Mutation:
    rows = data.split(b"\n")
    rows = [row + b"\r" if draw.random() < 0.9 else row for row in rows]
    return b"\n".join(rows), lines_of(data), []


def encoded(data: bytes, other: bytes, draw: random.Random) -> Mutation:
    text = data.decode()
    name = draw.choice(["utf-8-sig", "utf-16"])
    return text.encode(name), text.split("\n"), []


def dirtied(data: bytes, other: bytes, draw: random.Random) -> Mutation:
    rows = data.split(b"\n")
    hit = sorted(draw.sample(range(len(rows)), min(len(rows), draw.randint(1, 60))))
    touched = [rows[index].decode("utf-8", "replace") for index in hit]
    for index in hit:
        at = draw.randint(0, len(rows[index]))
        rows[index] = rows[index][:at] + draw.choice([b"\0", b"\xe9", b"\xff\xfe", b"\0\0\0"]) + rows[index][at:]
    kept = [row.decode("utf-8", "replace") for index, row in enumerate(data.split(b"\n")) if index not in set(hit)]
    return b"\n".join(rows), kept, touched


MUTATIONS: tuple[Callable[[bytes, bytes, random.Random], Mutation], ...] = (
    truncated,
    interleaved,
    carriage_returns,
    encoded,
    dirtied,
)


def wrong(found: Counter[str], whole: list[str], touched: list[str]) -> list[str]:
    """Counts that are not those of the whole lines, or of them and some of the touched ones."""
    least = truth(whole)
    options = [truth([line]) for line in touched]
    most = least + sum(options, Counter())
    names = [*PATTERNS, "new tokens", "cached tokens"]
    return [
        f"{name}: {found[name]}, not {least[name]} to {most[name]}"
        for name in names
        if not least[name] <= found[name] <= most[name]
    ]


def copies(paths: list[Path], count: int, seed: int, folder: Path) -> None:
    """Read mutated copies of each log, and say how many crash or are counted wrong."""
    for index, path in enumerate(paths):
        data, other = path.read_bytes(), paths[(index + 1) % len(paths)].read_bytes()
        reader = ingest([path]).documents[0].file.format
        bad: Counter[str] = Counter()
        unread: Counter[str] = Counter()
        draw = random.Random(seed)
        for number in range(count):
            mutation = MUTATIONS[number % len(MUTATIONS)]
            mutated, whole, touched = mutation(data, other, draw)
            copy = folder / "copy.log"
            copy.write_bytes(mutated)
            try:
                file = ingest([copy]).documents[0].file
            except Exception as error:
                bad["crashed"] += 1
                print(f"  copy {number}, {mutation.__name__}: {error!r}")
                continue
            unread[mutation.__name__] += file.unread
            bad["format lost"] += file.format == UNKNOWN and bool(sum(truth(whole).values()))
            bad["lines lost"] += file.read + file.unread != file.lines
            if reader == "sglang-log" and file.format == reader:
                faults = wrong(counted(copy), whole, touched)
                bad["wrong count"] += bool(faults)
                for fault in faults:
                    print(f"  copy {number}, {mutation.__name__}: {fault}")
        results = ", ".join(f"{bad[name]} {name}" for name in ("crashed", "wrong count", "lines lost", "format lost"))
        print(f"{path.name} ({reader}): {count} copies: {results}; unread lines: {dict(unread)}")


def long(path: Path, megabytes: int, folder: Path) -> None:
    """Read a log that is repeated until it has so many megabytes."""
    data = path.read_bytes()
    data += b"" if data.endswith(b"\n") else b"\n"
    times = max(1, megabytes * 1_000_000 // len(data))
    copy = folder / "long.log"
    with copy.open("wb") as file:
        for _ in range(times):
            file.write(data)
    size = copy.stat().st_size / 1e6
    began, cpu = time.perf_counter(), time.process_time()
    result = ingest([copy]).documents[0]
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{path.name}: {size:.0f} MB, {result.file.lines:,} lines, {result.file.unread:,} unread: {wall:.1f} s, "
        f"{size / wall:.1f} MB/s ({size / cpu:.1f} MB per second of CPU), {memory:.0f} MiB"
    )
    if result.file.format == "sglang-log":
        expected = Counter({name: count * times for name, count in truth(lines_of(data)).items()})
        found = counted(copy)
        kept = {name for name in expected if name != "server"}  # a list of servers is bounded
        print(
            f"  counts: {'right' if all(found[name] == expected[name] for name in kept) else f'{found}, not {expected}'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--copies", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies(given.logs, given.copies, given.seed, Path(folder))
        for path in given.logs if given.megabytes else ():
            long(path, given.megabytes, Path(folder))


if __name__ == "__main__":
    main()
