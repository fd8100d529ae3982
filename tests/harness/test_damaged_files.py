"""Each file that a command reads, in turn a pipe, a device, a folder, empty, cut off, and not there: the command ends soon."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from assay import worker
from assay.evals.tiny_model.families import SOURCE
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.drivers.bisect.commits import bisection
from assay.harness.drivers.bisect.commits.state import Measurement
from assay.harness.drivers.sweep.spec import SweptCell
from assay.harness.engines import guardian
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.errors import AssayError
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.evidence.pack import Source
from assay.harness.files import LOCK

DATA = Path(__file__).parents[1] / "data"
KERNEL = """\
from pathlib import Path

import torch

torch.tensor((Path(__file__).parent / "tuned.json").stat().st_size)


def forward(call):
    return call.q
"""
SIDES = ("--reference=torch_native", "--candidate=torch_native")
# Seconds in which a command ends that starts nothing, on a busy machine.
_LIMIT = 60
Commands = list[list[str]]
Files = list[Path]


def by_kind(folder: Path) -> Files:
    """One file of each suffix and folder, and one of each name that is unlike the others'."""
    found = {
        (path.suffix, path.parent, path.stem.strip("-0123456789abcdef")): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }
    return [*found.values()]


class Stores:
    """What commands read: each method writes some files into the working directory, and returns them and the commands."""

    def __init__(self, recorded: ModuleType, arms: ModuleType, histories: ModuleType, call: Callable[..., int], out: Any) -> None:
        self.recorded, self.arms, self.call, self.out = recorded, arms, call, out
        made = histories.make(Path("repo").absolute(), histories.straight(3), lambda i: f"N = {i}\n")
        self.bisect = ["bisect", "commits", "--repo=repo", f"--good={made.commits[0]}", f"--bad={made.commits[-1]}"]
        self.bisect += ["--kernel=attn:f", "--out=bisected"]
        Path("kernels.py").write_text(KERNEL)
        Path("tuned.json").write_text("{}")

    def run(self) -> tuple[Files, Commands]:
        self.recorded.RUNS["layers/exact"](Path("runs/a"))
        shutil.copytree("runs/a", "runs/whole")
        return by_kind(Path("runs/a")), [
            ["report", "runs/a"], ["compare", "runs/a", "runs/whole"], ["compare", "runs/whole", "runs/a"],
            ["gate", "accept", "runs/a", "--baselines=accepted"], ["ingest", "runs/a"], ["runs", "runs"],
        ]  # fmt: skip

    def baselines(self) -> tuple[Files, Commands]:
        self.recorded.with_stored(Path("runs/a"))
        (place,) = Path("runs/a-baselines").iterdir()
        gate = ["gate", *SIDES, f"--reference={place}", "--suites=accuracy", "--questions=8", "--out=gated"]
        return [*place.rglob("*.json*"), *Path("runs/a/baseline").rglob("*.json*")], [
            ["gate", "accept", "runs/a-accepted", "--baselines=runs/a-baselines"],
            ["report", "runs/a"],
            gate,
        ]

    def features(self) -> tuple[Files, Commands]:
        self.arms.write(InvarianceFolder(Path("runs/a"), "nonce"), [self.arms.arm("page-size")])
        return by_kind(Path("runs/a")), [["report", "runs/a"], ["runs", "runs"]]

    def bench(self) -> tuple[Files, Commands]:
        self.recorded.timed(Path("runs/a"))
        return by_kind(Path("runs/a/bench")), [["report", "runs/a"], ["runs", "runs"]]

    def model(self) -> tuple[Files, Commands]:
        shutil.copytree(SOURCE, "model")
        sides = [*SIDES, "--model=model"]
        return [path for path in Path("model").iterdir() if path.stat().st_size < 1 << 20], [
            ["run", *sides], ["gate", *sides], ["bench", *sides], ["bisect", "layers", *sides],
            ["invariance", "--model=model"], ["fingerprint", "--model=model"], ["doctor", *sides],
            ["check", "kernels:forward", "--like=model", "--case=none"], ["backends", "--honours", "--model=model", "no"],
        ]  # fmt: skip

    def pack(self) -> tuple[Files, Commands]:
        writer = PackWriter(Path("pack"), Source(engine="e", model="m", model_hash="", reference="a", candidate=""), 10**7)
        for layer, phase in enumerate(("extend", "decode")):
            lens = [(9, 40), (5, 0)] if phase == "extend" else [(1, 50), (1, 19)]
            call = call_of(lens, (4, 2), 64, torch.float32, "cpu").with_spec(layer=layer, phase=phase)
            writer.add(call, rounded_oracle(call))
        writer.flush()
        replay = ["replay", "pack", "--candidate=kernels:forward", "--read-out=0"]
        return by_kind(Path("pack")), [replay, [*self.bisect, "--pack=pack"]]

    def kernel(self) -> tuple[Files, Commands]:
        sweep = ["sweep", "check", "--set=candidate=kernels:forward", "--dry-run", "--out=swept"]
        return [Path("tuned.json")], [sweep]

    def sweep(self) -> tuple[Files, Commands]:
        Path("sweep.toml").write_text('command = "check"\n[axes]\ncandidate = ["kernels:forward"]\n')
        command = ["sweep", "sweep.toml", "--dry-run", "--out=swept"]
        self.call(*command)
        key = self.out().out.split()[2]
        cell = Path("swept/cells", key, "cell.json")
        cell.parent.mkdir(parents=True)
        cell.write_text(SweptCell(key=key, command=("check", "kernels:forward"), axes={}, verdict="pass").model_dump_json())
        return [Path("sweep.toml"), cell], [command]

    def bisected(self) -> tuple[Files, Commands]:
        self.call(*self.bisect)
        return by_kind(Path("bisected")), [self.bisect]

    def fingerprints(self) -> tuple[Files, Commands]:
        for name in "ab":
            Path(f"{name}.json").write_text(Fingerprint(source="server", engine="e", model="m").model_dump_json())
        gate = ["gate", *SIDES, "--model=nothing", "--fingerprint=a.json"]
        return [Path("a.json")], [["compare", "a.json", "b.json"], ["compare", "b.json", "a.json"], gate]

    def tensors(self) -> tuple[Files, Commands]:
        values = {"out": torch.ones(1, 4, 2, 8)}
        for name in ("a", "b"):
            torch.save(values, f"{name}.pt")
            save_file(values, f"{name}.safetensors")
            np.save(f"{name}.npy", values["out"].numpy())
            np.savez(f"{name}.npz", out=values["out"].numpy())
            Path(f"dump-{name}").mkdir()
            torch.save(values, f"dump-{name}/pass.pt")
        pairs = [(f"a.{kind}", f"b.{kind}") for kind in ("pt", "safetensors", "npy", "npz")] + [("dump-a", "dump-b")]
        files = [*Path().glob("a.*"), Path("dump-a/pass.pt")]
        return files, [
            *(["compare", *pair] for pair in pairs),
            *(["compare", b, a] for a, b in pairs),
            *(["ingest", a] for a, _ in pairs),
        ]

    def results(self) -> tuple[Files, Commands]:
        shutil.copytree(DATA, "data", ignore=shutil.ignore_patterns("golden", "server_failures", "README.md", "*.toml"))
        files = [path for path in by_kind(Path("data")) if path.is_file()]
        named = [path if path.parent.parent == Path("data") else path.parent for path in files]
        return files, [["ingest", str(path)] for path in dict.fromkeys(named)] + [
            ["compare", "data/results/lm_eval_a", "data/results/lm_eval_b"],
            ["compare", "data/results/inspect_b.eval", "data/results/inspect_a.eval"],
            ["compare", "data/results/simple_evals_a", "data/results/simple_evals_b"],
        ]  # fmt: skip

    def settings(self) -> tuple[Files, Commands]:
        Path("assay.toml").write_text("questions = 8\n")
        words = (["run"], ["gate"], ["bench"], ["bisect", "layers"], ["invariance"])
        accept = ["gate", "accept", "nothing", "--config=assay.toml"]
        return [Path("assay.toml")], [*([*each, "--config=assay.toml", "--model=nothing"] for each in words), accept]

    def questions(self) -> tuple[Files, Commands]:
        Path("mmlu").mkdir()
        Path("mmlu/test.csv").write_text("What is 1 + 1?,1,2,3,4,B\n" * 8)
        Path("q.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2 #### 2"}\n' * 8)
        words = (["run"], ["gate"], ["bench"], ["bisect", "layers"])
        named = ("mmlu", "mmlu/test.csv", "gsm8k:q.jsonl", "q.jsonl")
        return [Path("mmlu/test.csv"), Path("q.jsonl")], [
            [*each, *SIDES, "--model=nothing", f"--data={data}"] for each in words for data in named
        ]


# These take half of the time of all, and are damaged in slow tests alone.
_LONG = ("pack", "baselines", "bench")
STORES = [pytest.param(name, marks=[pytest.mark.slow] * (name in _LONG)) for name in vars(Stores) if not name.startswith("_")]


# The path that is to be opened by nobody, and where it is noted if it is; a hook of Python's stays for ever.
_watched: dict[str, Path] = {}


def _fail_if_watched(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event == "open" and isinstance(arguments[0], str | bytes):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path in _watched:
            _watched.pop(path).write_text("by Python")
            pytest.fail(f"{path} was opened")


sys.addaudithook(_fail_if_watched)


@contextmanager
def released(path: Path, waited: Path) -> Iterator[None]:
    """Release a pipe that other code than Python's opens, which may hold Python's lock meanwhile, and write that to `waited`."""
    releasing = os.fork() if path.is_fifo() else -1
    while not releasing:
        time.sleep(0.005)
        with suppress(OSError):  # nobody reads
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            if stat.S_ISFIFO(os.fstat(opened).st_mode):  # and no file that a command put in the place of the pipe
                waited.write_text("by other code")
            os.close(opened)
    try:
        yield
    finally:
        if releasing > 0:
            os.kill(releasing, signal.SIGKILL)
            os.waitpid(releasing, 0)


@contextmanager
def opened_by_nobody(path: Path, waited: Path) -> Iterator[None]:
    """Fail at once where Python opens a path, and write that to `waited`."""
    _watched[str(path.absolute())] = waited
    try:
        yield
    finally:
        _watched.clear()


@contextmanager
def ended_soon(what: str) -> Iterator[None]:
    def late(*_: object) -> NoReturn:
        pytest.fail(f"{what} did not end within {_LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# The damages but a pipe are done in slow tests alone.
_SLOW = ("device", "folder", "empty", "cut", "absent")
DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "pipe": lambda path, whole: os.mkfifo(path),
    "device": lambda path, whole: path.symlink_to("/dev/null"),
    "folder": lambda path, whole: path.mkdir(),
    "empty": lambda path, whole: path.write_bytes(b""),
    "cut": lambda path, whole: path.write_bytes(whole[: len(whole) // 2]),
    "absent": lambda path, whole: None,
}


@pytest.mark.parametrize("damage", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in DAMAGES])
@pytest.mark.parametrize("store", STORES)
def test_every_command_ends_soon_whatever_is_in_place_of_a_file(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], recorded_runs: ModuleType, arm_records: ModuleType,
    histories: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, damage: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bisection, "_measure", lambda *_, **__: Measurement(status="build", reason="no compiler"))
    if store in ("model", "settings", "questions", "baselines"):  # what a model can do without is let through

        def none(*_: object, **__: object) -> NoReturn:
            raise AssayError("No process is started here.")

        monkeypatch.setattr(guardian, "start", none)
        monkeypatch.setattr(worker, "_fork", none)
    files, commands = getattr(Stores(recorded_runs, arm_records, histories, call, capsys.readouterr), store)()
    assert files
    wrong, waited = [], tmp_path / "waited"
    for path in files:
        whole = path.read_bytes()
        path.unlink()
        DAMAGES[damage](path, whole)
        special = path.is_fifo() or path.is_char_device()
        naming = [command for command in commands if any(path.is_relative_to(word) for word in command)]
        with released(path, waited):
            for command in naming or commands:
                what = f"{path}: assay {' '.join(command)}"
                with ended_soon(what), opened_by_nobody(path, waited) if special else nullcontext():
                    code = call(*command)
                said = "".join(capsys.readouterr())
                if waited.exists() or "a bug in assay" in said:
                    wrong.append(f"{what}: {'it was opened' if waited.exists() else said[-300:]}")
                waited.unlink(missing_ok=True)
                if command[0] == "runs":
                    assert (code, "whole" in said or store != "run") == (0, True), what
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(whole)
    assert not wrong, "\n".join(wrong)
