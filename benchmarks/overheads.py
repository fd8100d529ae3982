"""Cost of observing a real server: the shadow in prefill, and the counting of attention calls in decode.

    python benchmarks/overheads.py --device cuda

Prints ratios from turns that alternate within one run:

- prefill with a shadow candidate over prefill without, in one server whose shadow is switched on and off;
- decode with counted attention calls over decode without, in two servers, with CUDA graphs on a GPU; and counting alone, on a
  backend that does almost nothing, compared with the decode step of those servers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import DUMMY_WEIGHTS, REFERENCE, shaped_model
from rich.console import Console
from rich.table import Table
from torch import Tensor

from assay.harness.engines.inside.control import EVIDENCE, SHADOW, Control, set_control
from assay.harness.engines.launch import Launch
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.sglang.meter import meter
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.run.servers import core_of
from assay.harness.sides import Device

CONSOLE = Console(width=140)
PREFILLS = {"cpu": (32, 128), "cuda": (512, 2048, 8192)}
DECODED = {"cpu": 64, "cuda": 256}
VOCABULARY = range(100, 400)
TURNS, PASSES = 200, 50
"""Turns, and decode passes of a turn, in which counting is timed alone."""


def server(
    device: Device, model: Path, folder: Path, flags: tuple[str, ...], eager: bool, extra: dict[str, str]
) -> SGLangServer:
    folder.mkdir(parents=True)
    return SGLangServer(
        Launch(
            role="reference", backend=REFERENCE[device], model=Path(model), device=device, evidence=folder,
            log=folder / "server.log", decode_backend=REFERENCE[device], engine_args=flags, cpu_core=core_of(device),
            eager=eager, extra=extra, startup_timeout=900, request_timeout=300,
        )
    )  # fmt: skip


def seconds(server: SGLangServer, prompt: int, output: int, rng: random.Random) -> float:
    """Duration of one request whose prompt is not cached."""
    ids = rng.choices(VOCABULARY, k=prompt)
    begun = time.perf_counter()
    server.send("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": output, "ignore_eos": True}})
    return time.perf_counter() - begun


def alternate(
    one: Callable[[], float], other: Callable[[], float], turns: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Durations of both, in random order within each turn; the first three turns are warm-up."""
    first, second = [], []
    for turn in range(-3, turns):
        pair = [(one, first), (other, second)]
        rng.shuffle(pair)
        for run, times in pair:
            taken = run()
            if turn >= 0:
                times.append(taken)
    return first, second


def row(name: str, first: list[float], second: list[float]) -> tuple[str, ...]:
    """Medians in ms, and the median ratio of a turn with the middle half of the ratios."""
    low, middle, high = statistics.quantiles([b / a for a, b in zip(first, second, strict=True)], n=4)
    return (
        name,
        f"{1000 * statistics.median(first):.2f}",
        f"{1000 * statistics.median(second):.2f}",
        f"{middle:.3f}",
        f"{low:.3f} to {high:.3f}",
    )


def shadow_cost(
    device: Device, model: Path, folder: Path, flags: tuple[str, ...], candidates: list[str], turns: int
) -> None:
    table = Table(
        "candidate, tokens", "without, ms", "with, ms", "ratio", "middle half", title="Prefill with the shadow"
    )
    for number, candidate in enumerate(candidates):
        rng = random.Random(0)
        one = server(device, model, folder / f"shadow{number}", flags, True, {SHADOW: candidate})

        def prefill(tokens: int, watch: bool, one: SGLangServer = one, rng: random.Random = rng) -> float:
            set_control(one.launch.evidence, Control(shadow=watch))
            return seconds(one, tokens, 1, rng)

        with one:
            for tokens in PREFILLS[device]:
                times = alternate(lambda n=tokens: prefill(n, False), lambda n=tokens: prefill(n, True), turns, rng)
                table.add_row(*row(f"{candidate}, {tokens}", *times))
    CONSOLE.print(table)


def counting_cost(device: Device, model: Path, folder: Path, flags: tuple[str, ...], turns: int) -> None:
    table = Table("batch 1", "uncounted, ms", "counted, ms", "ratio", "middle half", title="Decode with calls counted")
    rng = random.Random(0)
    output = DECODED[device]
    with ExitStack() as running:
        plain = running.enter_context(server(device, model, folder / "plain", flags, False, {EVIDENCE: ""}))
        counted = running.enter_context(server(device, model, folder / "counted", flags, False, {}))
        times = alternate(
            lambda: seconds(plain, 16, output, rng), lambda: seconds(counted, 16, output, rng), turns, rng
        )
    table.add_row(*row(f"{output} tokens", *times))
    CONSOLE.print(table)
    layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    step = statistics.median(times[0]) / output
    table = Table(
        "", "a pass, us", "of a decode step", title=f"Counting alone, {layers} layers, step {1e3 * step:.3f} ms"
    )
    print_alone(table, counting_alone(device, layers, folder), step)


def print_alone(table: Table, costs: dict[str, list[float]], step: float | None = None) -> None:
    """Print what is added to a pass, in microseconds, and as a share of a decode step of `step` seconds if there was one."""
    for name, cost in costs.items():
        low, middle, high = statistics.quantiles(cost, n=4)
        shown = (f"{1e6 * s:.2f}" for s in (middle, low, high))
        table.add_row(name, "{} ({} to {})".format(*shown), *([] if step is None else [f"{100 * middle / step:.3f} %"]))
    CONSOLE.print(table)


class Nothing:
    """A stand-in for an attention backend: one operation on a few bytes per call."""

    def forward_extend(self, q: Tensor, k: None, v: None, layer: Any, forward_batch: Any) -> Tensor:
        return q.neg_()

    forward_decode = forward_extend


def counting_alone(device: Device, layers: int, folder: Path) -> dict[str, list[float]]:
    """Seconds that are added to a decode pass, per turn.

    By counting, with single calls and, on a GPU, in a replayed CUDA graph; and there by keeping the calls for the shadow.
    """
    model, batch = [SimpleNamespace(layer_id=number) for number in range(layers)], SimpleNamespace(rids=[])
    q = torch.zeros(8, device=device)

    def decode(backend: Any) -> None:
        for layer in model:
            backend.forward_decode(q, None, None, layer, batch)

    def timed(run: Callable[[], None]) -> float:
        begun = time.perf_counter()
        for _ in range(PASSES):
            run()
        if q.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / PASSES

    plain, counted = Nothing(), meter(Nothing(), "nothing", folder / "alone", device)
    pairs = {"called one by one": (lambda: decode(plain), lambda: decode(counted))}
    if q.is_cuda:
        graphs = []
        for backend in (plain, counted):
            decode(backend)
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                decode(backend)
        pairs["replayed"] = (graphs[0].replay, graphs[1].replay)
    costs = {}
    for name, (one, other) in pairs.items():
        first, second = alternate(lambda run=one: timed(run), lambda run=other: timed(run), TURNS, random.Random(0))
        costs[name] = [b - a for a, b in zip(first, second, strict=True)]
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument(
        "--candidate",
        action="append",
        help="candidate in the shadow; by default the reference itself and sage_attn; may be repeated",
    )
    parser.add_argument(
        "--only", choices=("shadow", "counting", "alone"), help="alone: counting and keeping, without servers"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="assay-overheads-") as made:
        folder = Path(made)
        if args.only == "alone":
            table = Table("", "a pass, us", title="Added to a decode pass of 32 layers, no server")
            print_alone(table, counting_alone(args.device, 32, folder))
            return
        model, flags = TINY_MODEL, ()
        if args.device == "cuda":
            model, flags = shaped_model(folder / "8b"), (DUMMY_WEIGHTS,)
        if args.only != "counting":
            shadow_cost(
                args.device, model, folder, flags, args.candidate or [REFERENCE[args.device], "sage_attn"], args.turns
            )
        if args.only != "shadow":
            counting_cost(args.device, model, folder, flags, args.turns)


if __name__ == "__main__":
    main()
