"""Detection and naming of every fault of the family in a real server, as one table. No GPU; takes a few minutes.

    python benchmarks/fault_detection.py

One CPU server with the tiny model in float32. Its shadow runs a kernel of the contract that is correct except for one bug in one
layer and one q head, drawn at random. Each hypothesis gets a few questions: cold, with a cached prefix, and several in one batch;
then the recorded outputs are examined. A fault is pinned if the cells out of bounds, and every finding, lie in that layer and head
and no other; it is named if the only finding has its name.

A fault is silent if its output is within the bound of the correct one on every recorded call of its layer: nothing can detect it
there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from common import python_path
from rich.console import Console
from rich.table import Table
from torch import Tensor

from assay.evals.synthetic import questions
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle, requests
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.backend import Backend
from assay.harness.bugs.bug import LEAK
from assay.harness.bugs.family import BY_ID, FAMILY
from assay.harness.bugs.faults import fault
from assay.harness.evidence.cause import ReplayResult
from assay.harness.evidence.layer_diff_record import PACK_FOLDER
from assay.harness.evidence.pack import RecordedCall, read_pack
from assay.harness.evidence.shadow_errors import CONDITIONS, read_shadow_errors
from assay.harness.localize.bounds import bound_of
from assay.harness.localize.cells import cells_of, deviation
from assay.harness.offline.replay import replay_recorded
from assay.harness.server.control import RECORD, SHADOW
from assay.harness.text import some

SEEDED = "ASSAY_BENCHMARK_FAULT"
"""Environment variable: the file that holds the current fault of the kernel."""
CANDIDATE = "fault_detection:seeded"
LAYERS = HEADS = 4
BUDGET = 256 * 2**20
LONG_PROMPT_QUESTIONS = 20
"""Questions in the long prompt: about 600 tokens, so that errors of blocks and windows of up to 512 tokens show."""
BATCH_SIZE = 3
"""Questions per batch."""
MAX_BATCH_ATTEMPTS = 3
"""Attempts to have SGLang put them into one batch."""
TAIL = "\n\nThink again, and answer."


def seeded(call: AttentionCall) -> Tensor:
    """PyTorch's attention with the fault that the file currently holds."""
    now = json.loads(Path(os.environ[SEEDED]).read_text())
    return fault(now["hypothesis"], torch_sdpa, layers=[now["layer"]], heads=[now["head"]])(call)


@dataclass(frozen=True)
class Result:
    """The result for one fault.

    Attributes:
        at: layer and head of the fault.
        out: layers and heads with a cell out of bounds in the shadow.
        replay: examination of the recorded outputs.
        effect: largest error of the seeded output over the recorded calls, as a multiple of the call's bound.
        calls: recorded calls of its layer.
        seconds: duration of the questions and the examination.
    """

    name: str
    at: tuple[int, int]
    out: tuple[tuple[int, int], ...]
    replay: ReplayResult
    effect: float
    calls: tuple[AttentionCall, ...]
    seconds: float

    @property
    def silent(self) -> bool:
        """Whether the fault does not show on these calls."""
        return self.effect <= 1

    @property
    def pinned(self) -> bool:
        """Whether it was found in its layer and head and nowhere else."""
        layer, head = self.at
        where = f"{some('layer', [layer], range(LAYERS))}, {some('head', [head], range(HEADS))}"
        return (
            self.out == (self.at,)
            and bool(self.replay.findings)
            and all(where in f.where for f in self.replay.findings)
        )

    @property
    def named(self) -> str:
        """ "alone", "among n", or empty if the only finding does not have its name."""
        if len(self.replay.findings) != 1:
            return ""
        (finding,) = self.replay.findings
        fitting = (finding.id, *finding.equivalent)
        if self.name not in fitting:
            return ""
        return "alone" if len(fitting) == 1 else f"among {len(fitting)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=tuple(BY_ID), help="one fault; may be repeated")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="assay-faults-") as made:
        results = run(Path(made), args.only or list(BY_ID), rng)
    show(results, args.seed)


def run(folder: Path, names: Sequence[str], rng: random.Random) -> list[Result]:
    """Examine one fault after another in one server."""
    from assay.harness.collect.servers import core_of
    from assay.harness.engines.model import TINY_MODEL
    from assay.harness.engines.sglang.launch import Launch
    from assay.harness.engines.sglang.server import SGLangServer

    os.environ[SEEDED] = str(folder / "fault.json")  # the kernel runs in this process as well
    os.environ["PYTHONPATH"] = python_path()
    evidence = folder / "evidence"
    evidence.mkdir()
    launch = Launch(
        role="reference", backend="torch_native", model=TINY_MODEL, device="cpu", evidence=evidence,
        log=folder / "server.log", decode_backend="torch_native", cpu_core=core_of("cpu"), startup_timeout=900, request_timeout=300,
        extra={SHADOW: CANDIDATE, RECORD: str(BUDGET), SEEDED: os.environ[SEEDED]},
    )  # fmt: skip
    results = []
    with SGLangServer(launch) as server:
        for name in names:
            places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
            rng.shuffle(places)
            one = watch(server, evidence, name, places[0])
            # Some bugs cannot show in every head: with interleaved heads, the first one still reads its own.
            elsewhere = [at for at in places[1:] if one.silent and effect(name, at, one.calls) > 1]
            results.append(watch(server, evidence, name, elsewhere[0]) if elsewhere else one)
            print(f"{len(results)}/{len(names)} {name}: {results[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return results


def watch(server, evidence: Path, name: str, at: tuple[int, int]) -> Result:  # type: ignore[no-untyped-def]
    """Seed a fault, ask the questions, and examine the recorded calls."""
    from assay.harness.server.control import Control, set_control
    from assay.harness.server.write_request import write_now

    begun = time.monotonic()
    Path(os.environ[SEEDED]).write_text(json.dumps({"hypothesis": name, "layer": at[0], "head": at[1]}))
    drawn = list(islice(questions(), BATCH_SIZE + LONG_PROMPT_QUESTIONS))

    def send(*texts: str) -> None:
        server.send("/generate", {"text": list(texts), "sampling_params": {"max_new_tokens": 2, "temperature": 0}})

    server.flush_cache()
    set_control(evidence, Control(shadow=True))
    asked = [one.prompt for one in drawn[:BATCH_SIZE]]
    for text in (*asked, "\n\n".join(one.text for one in drawn[BATCH_SIZE:])):
        send(text)
    for attempt in range(1, MAX_BATCH_ATTEMPTS + 1):
        send(*(text + attempt * TAIL for text in asked))
        write_now(evidence, lambda: send("x"))
        recorded = read_pack(evidence / PACK_FOLDER)
        if any(
            one.call.phase == "extend" and sum(prefix > 0 for prefix in one.entry.prefix) == BATCH_SIZE
            for one in recorded
        ):
            break
    set_control(evidence, Control())
    replay = replay_recorded(evidence / PACK_FOLDER, Backend.parse(CANDIDATE), "")
    calls = tuple(one.call for one in recorded if one.call.layer == at[0])
    seconds = time.monotonic() - begun
    return Result(name, at, out_of_bounds(evidence, recorded), replay, effect(name, at, calls), calls, seconds)


def out_of_bounds(evidence: Path, recorded: Sequence[RecordedCall]) -> tuple[tuple[int, int], ...]:
    """Layers and heads with a cell, in any condition, whose error in the shadow exceeds the bound of every recorded call."""
    cells = read_shadow_errors(evidence)
    table = cells.table(by=("layer", "head", *CONDITIONS))
    worst = table.relative_l1.reshape(*table.relative_l1.shape[:2], -1)
    bound = max(bound_of(one.call) for one in recorded)
    layers, heads = (table.axes[name] for name in ("layer", "head"))
    return tuple(
        (int(layer), int(head))
        for i, layer in enumerate(layers)
        for j, head in enumerate(heads)
        if (worst[i, j] > bound).any()
    )


def effect(name: str, at: tuple[int, int], calls: Sequence[AttentionCall]) -> float:
    """Largest error of a fault in this layer and head on these calls, as a multiple of each call's bound."""
    kernel = fault(name, layers=[at[0]], heads=[at[1]])
    errors = [
        deviation(kernel(call), oracle(call), cells_of(call)).relative_l1.max() / bound_of(call) for call in calls
    ]
    return max(map(float, errors), default=0.0)


def why_silent(result: Result) -> str:
    """Why the bug cannot show on these calls."""
    batch = [r for call in result.calls for r in requests(call)]
    kind = BY_ID[result.name].kind
    if kind == "sliding-window":
        return f"the longest sequence has {max(r.len_k for r in batch)} tokens"
    if result.name.startswith("values"):
        return f"the largest value is {max(float(r.v.abs().max()) for r in batch):.2g}"
    if result.name.startswith("scores"):
        products = (float(((r.q @ r.k[r.kv_head].transpose(1, 2)) * r.visible).abs().max()) for r in batch)
        return f"the largest q k product is {max(products):.2g}"
    if result.name == "scale-of-head-dim-v":
        return f"head_dim and head_dim_v are both {batch[0].v.shape[2]}"
    if kind == "kv-heads":
        return f"{batch[0].k.shape[0]} kv heads: the previous one is also the next one"
    return f"{result.effect:.2g} of the bound"


def show(results: Sequence[Result], seed: int) -> None:
    """Print the table and the totals."""
    console = Console(width=180)
    table = Table("fault", "seeded at", "found at", "named", "own error / bound", "s", title=f"Faults, seed {seed}")
    for one in results:
        found = " ".join(f"L{layer} H{head}" for layer, head in one.out) or "-"
        titles = "; ".join(finding.title for finding in one.replay.findings)
        if one.silent:
            named = f"silent: {why_silent(one)}" + (f", yet found: {titles}" if titles else "")
        else:
            named = one.named or f"NO: {titles or 'nothing'}"
        table.add_row(
            one.name, f"L{one.at[0]} H{one.at[1]}", found + ("" if one.silent or one.pinned else " WRONG"), named,
            f"{one.replay.worst:.2g}", f"{one.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    loud = [one for one in results if not one.silent]
    alone = sum(one.named == "alone" for one in loud)
    console.print(
        f"{len(results)} faults: {len(results) - len(loud)} silent on these calls; of the other {len(loud)}, "
        f"{sum(one.pinned for one in loud)} pinned to their layer and head, {sum(bool(one.named) for one in loud)} named "
        f"({alone} alone). Leaks among them: {sum(BY_ID[one.name].kind == LEAK for one in loud)} of "
        f"{sum(h.kind == LEAK for h in FAMILY)}. Findings on silent ones: "
        f"{sum(len(one.replay.findings) for one in results if one.silent)}."
    )


if __name__ == "__main__":
    main()
