"""Record assay's decisions, so that a restructuring can show that it changed none.

    python tools/characterise.py --out before.json              # on the tree before
    python tools/characterise.py --against before.json          # on the tree after: prints differences, and exits with 1 if any
    python tools/characterise.py --against before.json --renames renames.toml
    python tools/characterise.py --only runs --only check/fault # parts, or cases whose name begins so; --out adds to its file

Each case is one use of the product, by its command line or public API. It records verdict, exit code, checks with their states,
suites with their verdicts, findings with severity and place, numbers to three significant digits, and the three parts of a
refusal. They are recognised in a document by their fields (a check has an id and a status), so a document may change its shape.
A reason is kept as the id of the check, suite or finding that it quotes, or as text if it quotes none. Times, paths, hashes,
versions and names of temporary folders are removed.

The parts:

- ``runs``: recorded run folders (`tests/stand_ins/recorded_runs.py`), judged by ``assay report``; with ``--recorded FOLDER`` also
  those in a folder;
- ``check``: the catalogue of faults, the hypotheses and honest kernels of every noise family, on some calls of the op-level matrix
  (`CALLS`), without a read-out;
- ``kernels``: kernels that are wrong, refuse, raise or break the contract, by ``assay check`` and by ``assay replay`` of packs;
- ``wrong-uses``: those of ``tests/data/wrong_uses.toml``;
- ``ingest``: every sample below ``tests/data`` that ``assay ingest`` or ``assay compare`` reads;
- ``compare``: pairs of result sets, and of runs;
- ``servers``: whole runs on a stand-in for an engine, sound and failing.

With ``--decisions``, prose is left out of the comparison: only exit codes, verdicts, ids and numbers count.

A table of renames is TOML. ``[ids]`` maps whole strings and first words, ``[words]`` parts of strings; both apply to the earlier
record. ``[changed]`` maps the beginning of a case's name to the reason why it may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
sys.path.insert(0, str(ROOT))


def _load(path: str) -> ModuleType:
    """A module of a folder that is not a package."""
    name = f"characterise_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Everything here that depends on the tree's internals. Adapt it, and the stand-ins, to a restructuring.
COMMAND = _load("benchmarks/wrong_uses.py")
"""``run(line)`` calls a command in this process; ``USES``, ``make_folder`` and ``ENVIRONMENT`` belong to the wrong uses."""


def recorded_runs() -> Mapping[str, Callable[[Path], object]]:
    """The function that writes a run's folder, by the run's name."""
    found: Mapping[str, Callable[[Path], object]] = _load("tests/stand_ins/recorded_runs.py").RUNS
    return found


def wrong_kernels() -> Iterator[tuple[str, Any]]:
    """Every fault of the catalogue and every hypothesis, as kernels."""
    from assay.harness.attention.bugs.family import BY_ID
    from assay.harness.attention.bugs.faults import fault, rounded_oracle

    def seeded(one: Any, call: Any) -> Any:
        return one.apply(call, rounded_oracle(call))

    yield from (
        (f"fault/{one.id}", partial(seeded, one)) for one in _load("benchmarks/fault_catalogue.py").CATALOGUE.values()
    )
    yield from ((f"hypothesis/{id_}", fault(id_)) for id_ in BY_ID)


def honest_kernels() -> Iterator[tuple[str, Any]]:
    """Kernels that are right within the noise that they declare."""
    from assay import declares

    def called(kernel: Any, call: Any) -> Any:
        return kernel(call)

    for family, kernels in _load("benchmarks/honest_kernels.py").KERNELS.items():
        for number, kernel in enumerate(kernels):
            yield f"honest/{family or 'exact'}/{number}", declares(noise=family)(partial(called, kernel))


# Everything below knows the command line, the public API and documents.

Essence = dict[str, Any]
Cases = Iterator[tuple[str, Essence]]
# (new tokens, cached prefix) of each sequence, heads of Q and of K, head dim and dtype of the calls that kernels are checked on.
# They are short and cover all phases and dtypes. The op-level matrix has other calls, so it may change.
CALLS = (
    ([(41, 1)], (4, 2), 64, "float16"),
    ([(30, 0), (129, 17)], (8, 2), 64, "float16"),
    ([(20, 0), (65, 200)], (4, 1), 128, "float32"),
    ([(7, 1), (1, 40)], (4, 2), 64, "float32"),
    ([(1, 17), (1, 3)], (8, 2), 64, "float32"),
    ([(65, 16), (1, 16)], (4, 1), 128, "bfloat16"),
    ([(1, 30), (1, 65), (1, 9)], (4, 1), 64, "bfloat16"),
    ([(1, 5), (1, 63), (1, 130)], (4, 1), 128, "float32"),
    ([(1, 1)], (4, 4), 64, "bfloat16"),
    ([(9, 0)] * 8, (4, 4), 64, "bfloat16"),
    ([(10, 0)] * 7, (8, 2), 128, "float32"),
    ([(34, 157)], (4, 2), 64, "bfloat16"),
    ([(34, 0)], (24, 2), 128, "float16"),
)
STAND_IN = ("--reference=torch_native", "--candidate=triton", "--questions=96", "--greedy-prompts=16")
FAILURES = (
    "", "candidate:dies-starting", "candidate:dies-loading", "candidate:dies-answering", "reference:dies-answering",
    "candidate:truncated", "candidate:malformed", "candidate:keyless",
)  # fmt: skip
"""Behaviours of the stand-in for an engine; empty for a sound run."""
KERNELS = """
from dataclasses import replace
from assay import KernelRefused, declares, oracle

def right(call):
    return oracle(call).to(call.q.dtype)

@declares(phases=("extend",))
def right_in_extend(call):
    return right(call)

def scaled(call):
    return oracle(replace(call, scale=call.scale * 1.1)).to(call.q.dtype)

def zero(call):
    return right(call) * 0

def not_finite(call):
    return right(call) / 0

def blind_to_the_first_key(call):
    wrong = right(call).clone()
    wrong[0] = wrong[-1]
    return wrong

def raises(call):
    raise RuntimeError("out of shared memory")

def refuses(call):
    raise KernelRefused("too long")

def refuses_a_prefix(call):
    if any(call.prefixes):
        raise KernelRefused("a cached prefix")
    return right(call)

def another_shape(call):
    return right(call)[1:]

def another_dtype(call):
    return oracle(call)

def writes_into_q(call):
    out = right(call)
    call.q.zero_()
    return out

def ends(call):
    raise SystemExit(0)
"""
PROSE = ("found", "expected", "do", "said", "reasons")
VOLATILE = (
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "<hash>"),
    (re.compile(r"\b20\d\d-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b\d+(?:\.\d+)+(?:\+cpu|\.dev\d+)\b|(?<=[a-zA-Z] )\d+\.\d+\.\d+\b"), "<version>"),
    (re.compile(r"\b\d+(?:\.\d+)? (?:s|ms|min|seconds|CPU s)\b"), "<time>"),
    (re.compile(r"\bprocess \d+\b|\bpid \d+\b"), "<process>"),
    (re.compile(r"(?<=:)\d{4,5}\b(?!\.)"), "<port>"),
)  # fmt: skip


def plain(text: str, *folders: Path) -> str:
    """Text on one line, without anything that differs from run to run."""
    for folder in (*folders, ROOT):
        text = text.replace(str(folder), "<folder>")
    text = re.sub(r"/tmp/[\w./-]*", "<folder>", text)
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    text = re.sub(r"(?<![\w.])-?\d+\.\d{3,}(?:e[+-]?\d+)?(?![\w.])", lambda found: str(rounded(float(found[0]))), text)
    return " ".join(text.split())


def rounded(value: float) -> float | int | str:
    """A number to three significant digits; a word if it is not finite, since JSON has no such number."""
    if isinstance(value, int):
        return value
    return float(f"{value:.3g}") if math.isfinite(value) else str(value)


def parts(text: str, *folders: Path) -> Essence:
    """The three parts of a refusal: what was found, what was expected, what to do."""
    found = re.match(r"(.*?)^Expected:(.*?)^What to do:(.*)", text, re.DOTALL | re.MULTILINE)
    if not found:
        return {"said": plain(text, *folders)}
    return dict(zip(("found", "expected", "do"), (plain(one, *folders) for one in found.groups()), strict=True))


def essence(document: Any, *folders: Path) -> Essence:
    """The decisions in a result, wherever they stand in its document."""
    made: Essence = {}
    kept: dict[str, list[Any]] = {}
    quoted: list[tuple[str, str]] = []

    def note(kind: str, one: Mapping[str, Any], *more: Any) -> None:
        kept.setdefault(kind, []).append(" ".join(plain(str(word), *folders) for word in (one["id"], *more)))
        texts = [str(one[key]) for key in ("why", "found", "diagnosis", "title") if len(str(one.get(key) or "")) > 8]
        quoted.extend((text, f"{kind}: {one['id']}") for text in texts)

    def walk(value: Any) -> None:
        if isinstance(value, Mapping):
            fields = value.keys()
            if {"id", "status"} <= fields:
                note("checks", value, value["status"])
            elif {"id", "severity"} <= fields:
                note("findings", value, value["severity"], value.get("where", ""))
            elif {"id", "verdict"} <= fields:
                note("suites", value, value["verdict"])
            elif {"id", "value"} <= fields and isinstance(value["value"], int | float | None):
                given = [value.get(key) for key in ("value", "low", "high", "bound")]
                numbers = [None if one is None else rounded(one) for one in given]
                kept.setdefault("numbers", []).append(f"{value['id']} {numbers}")
            elif {"claim", "outcome"} <= fields:
                kept.setdefault("claims", []).append(f"{value['claim']}: {value['outcome']}")
            elif {"task", "verdict"} <= fields:
                numbers = [rounded(value.get(key) or 0) for key in ("pairs", "lost", "gained", "loss", "low", "high")]
                kept.setdefault("tasks", []).append(f"{value['task']} {value['verdict']} {numbers}")
            elif {"format", "read", "unread"} <= fields:
                kept.setdefault("files", []).append(f"{value['format']} {value['read']} {value['unread']}")
            if isinstance(facts := value.get("facts"), Sequence):
                kept["facts"] = [*kept.get("facts", ()), *facts_of(facts)]
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner)

    walk(document)
    for key in ("verdict", "exit_code", "differences"):
        if key in document:
            made[key] = document[key]
    reasons = [_id_of(str(one), quoted) or plain(str(one), *folders) for one in document.get("reasons") or ()]
    return made | {kind: sorted(values) for kind, values in kept.items()} | ({"reasons": reasons} if reasons else {})


def _id_of(reason: str, quoted: Sequence[tuple[str, str]]) -> str:
    """The id that a reason quotes: the longest id's text that it contains, or that contains it; empty if it quotes none."""
    holds = [(len(text), id_) for text, id_ in quoted if text.rstrip(".") in reason or reason.rstrip(".") in text]
    return max(holds)[1] if holds else ""


def facts_of(facts: Sequence[Any]) -> list[str]:
    """Kinds of facts with their counts."""
    known = [one for one in facts if isinstance(one, Mapping)]
    kinds = Counter(str(one.get("kind", one.get("id", one.get("name", "")))) for one in known)
    return [f"{kind} x {count}" for kind, count in kinds.items()]


def command(line: str, *folders: Path) -> Essence:
    """The essence of a command's JSON, or its other output."""
    said = COMMAND.run(line)
    made: Essence = {"exit": said.exit_code}
    with contextlib.suppress(ValueError):
        return made | essence(json.loads(said.out), *folders)
    return made | parts(said.err.strip() or said.out.strip(), *folders)


def runs(place: Path, wanted: Callable[[str], bool], recorded: Path | None = None) -> Cases:
    """Recorded runs, judged again."""
    for name, write in recorded_runs().items():
        if wanted(name):
            # Alone in its folder: a run that was begun a second before counts as an earlier try.
            run = place / name / "run"
            write(run)
            yield name, command(f"report --json {run}", place)
    for folder in sorted(recorded.iterdir()) if recorded else ():
        if wanted(name := f"recorded/{folder.name}"):
            copy = shutil.copytree(folder, place / name)
            yield name, command(f"report --json {copy}", place)


def check(place: Path, wanted: Callable[[str], bool]) -> Cases:
    """Faults, hypotheses and honest kernels on some calls of the op-level matrix."""
    import torch

    from assay.harness.checks.check import check

    torch.set_num_threads(1)
    cases = [_case(number, *one) for number, one in enumerate(CALLS)]
    for name, kernel in (*wrong_kernels(), *honest_kernels()):
        if wanted(name):
            result = check(kernel, cases=cases, read_out=0)
            findings = sorted(f"{one.id} {one.severity} {one.where}" for one in result.findings)
            worst = math.nan if result.worst_own is None else result.worst_own / (result.worst_bound or math.nan)
            yield name, {
                "verdict": result.verdict, "exit": int(result.exit_code), "findings": findings,
                "wrong": sorted(result.failing), "computed": result.computed, "worst": rounded(worst),
            }  # fmt: skip


def _case(number: int, sequences: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, dtype: str) -> Any:
    """A case with a call of four layers in turn."""
    import torch

    from assay.harness.attention.matrix import Case
    from assay.harness.attention.sample_calls import call_of

    phase = "decode" if all(new == 1 for new, _ in sequences) else "extend"
    call = call_of(sequences, heads, head_dim, getattr(torch, dtype), "cpu", seed=number)
    call = call.with_spec(layer=number % 4, phase=phase)
    batch = " ".join(f"{new}+{prefix}" for new, prefix in sequences)
    condition = {"phase": call.phase, "batch": batch, "head_dim": str(head_dim), "dtype": dtype}
    return Case(f"{number}-{call.phase}-{dtype}", condition, lambda: call)


def kernels(place: Path, wanted: Callable[[str], bool]) -> Cases:
    """Kernels by name: on cases, and on a pack."""
    (place / "characterised.py").write_text(KERNELS)
    sys.path.insert(0, str(place))
    packs = {"written": _pack(place / "pack-written")}
    named = [f"characterised:{name}" for name in re.findall(r"^def (\w+)", KERNELS, re.MULTILINE)]
    for kernel in named:
        name = kernel.partition(":")[2]
        if wanted(f"check/{name}"):
            yield (
                f"check/{name}",
                apart(f"check {kernel} --json --read-out 0 --calls 0 --dtype float32 --phase decode", place),
            )
        for pack, folder in packs.items():
            if wanted(f"replay/{pack}/{name}"):
                yield f"replay/{pack}/{name}", apart(f"replay {folder} --candidate {kernel} --json --read-out 0", place)
    sys.path.remove(str(place))


def _pack(folder: Path) -> Path:
    """Write a pack of three calls, two of them with a cached prefix."""
    import torch

    from assay.harness.attention.oracle import oracle
    from assay.harness.attention.sample_calls import call_of
    from assay.harness.engines.inside.pack_writer import PackWriter, stratum
    from assay.harness.evidence.pack import Source

    writer = PackWriter(folder, Source(engine="SGLang", model="m", model_hash="h", reference="triton"), 1 << 24)
    for sequences in ([(7, 0)], [(4, 20)], [(3, 9), (5, 0)]):
        call = call_of(sequences, (4, 2), 32, torch.float32, "cpu")
        if writer.wants(stratum(call.layer, call.phase, call.lens_q, call.prefixes)):
            writer.add(call, oracle(call).to(call.q.dtype))
    writer.flush()
    return folder


def apart(line: str, place: Path, **environment: str) -> Essence:
    """The essence of a command in a separate process, as a user runs it."""
    path = os.pathsep.join([environment.pop("first", ""), str(ROOT), str(place)]).lstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "assay", *shlex.split(line)],
        cwd=place, env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(place), **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    made: Essence = {"exit": done.returncode}
    with contextlib.suppress(ValueError):
        return made | essence(json.loads(done.stdout), place)
    return made | parts(done.stderr.strip() or done.stdout.strip(), place)


def wrong_uses(place: Path, wanted: Callable[[str], bool]) -> Cases:
    """Wrong uses: exit code and the three parts."""
    COMMAND.make_folder(place)
    modules = set(sys.modules)
    with contextlib.chdir(place):
        for use in COMMAND.USES["use"]:
            if wanted(use["assay"]):
                said = COMMAND.run(use["assay"])
                yield use["assay"], {"exit": said.exit_code} | parts(said.err.strip() or said.out.strip(), place)
    for name in set(sys.modules) - modules:
        if str(place) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def ingest(place: Path, wanted: Callable[[str], bool]) -> Cases:
    """Samples of other tools' files."""
    with contextlib.chdir(DATA):
        kinds = ("sglang_log", "server_failures", "traces", "results")
        for path in (path for kind in kinds for path in sorted(Path(kind).iterdir())):
            if path.suffix not in (".md", ".toml") and wanted(f"{path}"):
                yield f"{path}", command(f"ingest --json {path}")
        traces = [path for path in sorted(Path("traces").iterdir()) if path.suffix != ".md"]
        for path in traces:
            copy = shutil.copy(path, place / f"b-{path.name}")
            if wanted(name := f"compare/{path.name}"):
                yield name, command(f"compare --json {path} {copy}", place)
        if wanted("compare tensors"):
            yield from _dumps(place)


def _dumps(place: Path) -> Cases:
    """Differences of a dump and of changed copies."""
    import numpy as np

    made = {"a": 0.0, "same": 0.0, "rounding": 1e-7, "wrong": 0.5, "nan": math.nan}
    values = np.random.default_rng(0).normal(size=(2, 6, 4, 8)).astype(np.float32)
    for name, change in made.items():
        changed = values.copy()
        changed[1, 3, 2] += np.float32(change)
        np.savez(place / f"{name}.npz", **{f"layer_{number}.attn": one for number, one in enumerate(changed)})
    for name in made:
        for flag in ("", "--tolerance 0", "--tolerance 1"):
            line = f"compare --json {place / 'a.npz'} {place / f'{name}.npz'} --layout thd {flag}"
            if name != "a":
                yield f"compare tensors/{name} {flag}".strip(), command(line, place)


def compare(place: Path, wanted: Callable[[str], bool]) -> Cases:
    """Pairs of results of one tool, of two tools, and of runs."""
    with contextlib.chdir(DATA / "results"):
        firsts = sorted(path for path in Path().iterdir() if path.stem.endswith("_a"))
        for a in firsts:
            others = [path for path in sorted(Path().iterdir()) if path.stem == f"{a.stem[:-2]}_b"]
            for b in others:
                for one, other in ((a, b), (b, a)):
                    if wanted(f"{one}/{other}"):
                        yield f"{one}/{other}", command(f"compare --json {one} {other}")
            if wanted(f"{a}/itself"):
                put = shutil.copytree if a.is_dir() else shutil.copy
                copy = put(a, place / a.name)
                yield f"{a}/itself", command(f"compare --json {a} {copy}", place)
        for a, b in itertools.pairwise(firsts):
            if wanted(f"{a}/{b}"):
                yield f"{a}/{b}", command(f"compare --json {a} {b}")
    written = recorded_runs()
    names = [name for name in ("answers/sound", "answers/seed-case", "answers/two-lost") if name in written]
    folders = [place / name.replace("/", "-") for name in names]
    if any(wanted(f"runs/{name}") for name in names):
        for name, folder in zip(names, folders, strict=True):
            written[name](folder)
            COMMAND.run(f"report {folder}")
        for name, folder in zip(names[1:], folders[1:], strict=True):
            yield f"runs/{name}", command(f"compare --json {folders[0]} {folder}", place)
        yield "runs/all", command(f"compare --json {' '.join(map(str, folders))}", place)


def servers(place: Path, wanted: Callable[[str], bool]) -> Cases:
    """Whole runs on a stand-in for an engine."""
    engine = str(ROOT / "tests" / "stand_ins" / "engine")
    for failure in FAILURES:
        name = failure.replace(":", "-") or "sound"
        if wanted(name):
            folder = place / name
            folder.mkdir()
            line = shlex.join(["run", "--json", "--out", str(folder / "run"), *STAND_IN, "--suites=accuracy,greedy"])
            made = apart(line, folder, STAND_IN_FAILS=failure, first=engine)
            made.pop("numbers", None)  # how many questions it asked depends on timing
            yield name, made


PARTS: dict[str, Callable[..., Cases]] = {
    "wrong-uses": wrong_uses, "ingest": ingest, "compare": compare, "runs": runs, "kernels": kernels, "check": check,
    "servers": servers,
}  # fmt: skip


def freeze(only: Sequence[str], recorded: Path | None = None, out: Path | None = None) -> dict[str, Essence]:
    """All cases, or those of some parts, by "part/case".

    Prints on standard error how long each part took, and adds each part to the file `out` when it is complete.
    """
    made: dict[str, Essence] = {}
    for part, cases in PARTS.items():
        wanted = partial(_wanted, part, only)
        if only and not any(word.split("/")[0] == part for word in only):
            continue
        before, start = len(made), sum(os.times()[:4])
        with tempfile.TemporaryDirectory(prefix="characterise-") as folder:
            place = Path(folder).resolve()
            more = {"recorded": recorded} if part == "runs" else {}
            for name, case in cases(place, wanted, **more):
                made[f"{part}/{name}"] = json.loads(json.dumps(case))
        took = sum(os.times()[:4]) - start
        print(f"{part}: {len(made) - before} cases, {took:.0f} CPU s", file=sys.stderr, flush=True)
        if out:
            kept = json.loads(out.read_text(encoding="utf-8")) if only and out.exists() else {}
            text = json.dumps(kept | made, indent=1, sort_keys=True, ensure_ascii=False)
            out.write_text(text + "\n", encoding="utf-8")
    return made


def _wanted(part: str, only: Sequence[str], name: str) -> bool:
    return not only or any(f"{part}/{name}".startswith(word) for word in only)


def renamed(value: Any, renames: Mapping[str, Mapping[str, str]]) -> Any:
    """A record, in the words of the later tree."""
    if isinstance(value, Mapping):
        return {renamed(key, renames): renamed(inner, renames) for key, inner in value.items()}
    if isinstance(value, list):
        return [renamed(one, renames) for one in value]
    if not isinstance(value, str):
        return value
    first, space, rest = value.partition(" ")
    ids = renames.get("ids", {})
    value = ids.get(value) or (f"{ids[first]}{space}{rest}" if first in ids else value)
    for old, new in renames.get("words", {}).items():
        value = value.replace(old, new)
    return value


def differences(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    renames: Mapping[str, Mapping[str, str]],
    skipped: Sequence[str] = (),
) -> list[str]:
    """Where two records differ, in lines, without the key `skipped` and the differences that the table of renames allows."""
    before, allowed = renamed(before, renames), tuple(renames.get("changed", {}))
    lines = []
    for case in sorted(before.keys() | after.keys()):
        if allowed and case.startswith(allowed):
            continue
        if case not in after or case not in before:
            lines.append(f"{case}: {'is gone' if case in before else 'is new'}")
            continue
        old, new = before[case], after[case]
        for key in sorted((old.keys() | new.keys()) - set(skipped)):
            a, b = old.get(key), new.get(key)
            if key != "reasons" and isinstance(a, list) and isinstance(b, list):
                a, b = (
                    sorted(a, key=str),
                    sorted(b, key=str),
                )  # a rename may have moved an entry; only reasons have an order
            if a != b:
                lines.append(f"{case}: {key}: {_changed(a, b)}")
    return lines


def _changed(a: Any, b: Any) -> str:
    if not isinstance(a, list) or not isinstance(b, list):
        return f"{json.dumps(a)} -> {json.dumps(b)}"
    gone, new = Counter(map(str, a)) - Counter(map(str, b)), Counter(map(str, b)) - Counter(map(str, a))
    return f"without {sorted(gone.elements())}, with {sorted(new.elements())}" if gone or new else "in another order"


def main(words: Sequence[str] | None = None) -> int:
    """Freeze, and write or compare."""
    parser = argparse.ArgumentParser(description="Record assay's decisions, or compare them with an earlier record.")
    parser.add_argument("--out", type=Path, help="a file for the record, as JSON")
    parser.add_argument("--against", type=Path, help="an earlier record to compare with")
    parser.add_argument("--renames", type=Path, help="a table of renames, as TOML")
    parser.add_argument(
        "--decisions", action="store_true", help="compare exit codes, verdicts, ids and numbers, not prose"
    )
    parser.add_argument("--recorded", type=Path, help="a folder of recorded runs to judge too")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a part, or part/case; may be repeated"
    )
    given = parser.parse_args(words)
    if unknown := [word for word in given.only if word.split("/")[0] not in PARTS]:
        parser.error(
            f"--only {unknown[0]}: expected one of {', '.join(PARTS)}, and perhaps the beginning of a case after /"
        )
    os.environ.update(COMMAND.ENVIRONMENT)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    warnings.simplefilter("ignore")
    after = freeze(given.only, given.recorded, given.out)
    if not given.against:
        return 0
    frozen = json.loads(given.against.read_text(encoding="utf-8"))
    before = {name: case for name, case in frozen.items() if _wanted("", [f"/{word}" for word in given.only], name)}
    renames = tomllib.loads(given.renames.read_text(encoding="utf-8")) if given.renames else {}
    lines = differences(before, after, renames, PROSE if given.decisions else ())
    for line in lines:
        print(line)
    print(f"{len(after)} cases, {len(lines)} differences", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
