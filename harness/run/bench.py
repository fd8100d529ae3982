"""A bench: check it, start both servers, play blocks alternately until time is up, and record every timing as it arrives."""

from __future__ import annotations

import itertools
import random
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from assay.evals.loads import CHUNK, Shape, check_fit, prefix, prompts, shapes_of
from assay.harness.config import BENCH_FLAGS
from assay.harness.engines.base import Engine
from assay.harness.engines.client import Client
from assay.harness.engines.launch import launching
from assay.harness.engines.model import model_shape
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, BenchManifest, Timing
from assay.harness.evidence.run_file import RUN
from assay.harness.judge.blocks import ReadAtOnce, blocks_of, first_warm, side_by_side
from assay.harness.progress import ProgressDisplay
from assay.harness.run.machine import origin_of
from assay.harness.run.plan import Plan
from assay.harness.run.servers import (
    check_together,
    core_of,
    make_engine,
    manifest_of,
    record_fingerprint,
    resolve_sides,
    running,
)
from assay.harness.sides import Device, Role, Side
from assay.harness.stats.ratio import MIN_RATIOS

# A block has as many requests as are in flight, but at least this many. Short blocks keep drift within a pair small.
_MIN_REQUESTS = 2
# Seconds to wait before replaying a block that was read late; after the last one the bench gives up. Other programs keep a
# machine busy for seconds at a time, and it is chance which server's tokens are then read late.
_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# The blocks of a load in a round: role, and whether it is the role's second block. Each round shuffles their order.
_TURNS: tuple[tuple[Role, bool], ...] = (
    ("reference", False), ("candidate", False), ("reference", True), ("candidate", True),
)  # fmt: skip


@dataclass(frozen=True)
class BenchPlan:
    """A checked bench.

    Attributes:
        run: backends, model, engine flags, bound and budget.
        shapes: lengths of the requests.
        vocabulary: size of the model's vocabulary.
        seed: seed of the prompts and of the order of blocks.
    """

    run: Plan
    shapes: tuple[Shape, ...]
    vocabulary: int
    seed: int

    @property
    def loads(self) -> list[tuple[Shape, int]]:
        """Every shape at every concurrency."""
        return list(itertools.product(self.shapes, self.run.spec.workload.latency_concurrency))

    @property
    def command(self) -> str:
        """The command that times the same again, without the run's other suites."""
        return shlex.join(["assay", "bench", *self.run.spec.given_flags(BENCH_FLAGS)])


def plan_bench(run: Plan, seed: int = 0) -> BenchPlan:
    """Check a bench; start nothing.

    Args:
        seed: seed of the prompts and of the order of blocks.

    Raises:
        UsageError: an unknown shape, a shape too long for the model, or servers that cannot run at the same time.
    """
    shapes = shapes_of(run.spec.workload.latency_shapes, run.spec.device)
    model = model_shape(run.model)
    check_fit(shapes, model.context)
    check_together(run, "their blocks alternate, so that drift cancels")
    return BenchPlan(run, shapes, model.vocabulary, seed)


@dataclass(frozen=True)
class Turn:
    """One block.

    Attributes:
        round: number of the round.
        role: the server under load.
        again: whether it is the role's second block of the round.
        shape: lengths.
        concurrency: largest number of requests in flight.
        seed: seed of the prompts, the same for the four blocks of a load in a round.
    """

    round: int
    role: Role
    again: bool
    shape: Shape
    concurrency: int
    seed: str

    @property
    def requests(self) -> int:
        """Number of requests."""
        return max(_MIN_REQUESTS, self.concurrency)


def turns(plan: BenchPlan) -> Iterator[list[Turn]]:
    """Yield groups of four blocks to play in succession, endlessly: each round has every load once, in random order."""
    rng = random.Random(plan.seed)
    for number in itertools.count():
        loads = plan.loads
        rng.shuffle(loads)
        for shape, concurrency in loads:
            seed = f"{plan.seed}/{number}/{shape.name}/{concurrency}"
            order = list(_TURNS)
            rng.shuffle(order)
            yield [Turn(number, role, again, shape, concurrency, seed) for role, again in order]


def bench(plan: BenchPlan, folder: BenchFolder, display: ProgressDisplay) -> None:
    """Start both servers, time them, and write the evidence into the folder."""
    run, chunked = plan.run, any(shape.chunked for shape in plan.shapes)
    # On the CPU both compute on the same core, since two cores are rarely equally fast and only one server is loaded at a time.
    engines = {
        role: make_engine(
            run,
            role,
            folder.server_folder(role),
            folder.log(role),
            cpu_core=core_of(run.spec.device),
            eager=run.has_decode_kernel,
            # A side's own flags override the chunk.
            side=side.launched_with({RUN: folder.nonce}, _chunk(side, run.spec.device) if chunked else ()),
        )
        for role, side in run.spec.sides.items()
    }
    display.say("Starting both servers.")
    with running(list(engines.values()), run.spec.device, display):
        for engine in engines.values():
            display.say(f"{engine.role.capitalize()} is {engine.backend} in {engine.label}.")
        _measure_servers(plan, engines, folder, display)
    folder.seal()


def _chunk(side: Side, device: Device) -> tuple[str, ...]:
    return (f"{launching(side.engine).CHUNK_FLAG}={CHUNK[device]}",)


def _measure_servers(
    plan: BenchPlan, engines: Mapping[Role, Engine], folder: BenchFolder, display: ProgressDisplay
) -> None:
    """Record two running servers, and play blocks until time is up."""
    manifest = BenchManifest(
        **vars(origin_of(plan.run, plan.command, folder.nonce)),
        seed=plan.seed,
        shapes=plan.shapes,
        eager=plan.run.has_decode_kernel,
        servers=tuple(manifest_of(engine) for engine in engines.values()),
    )
    folder.write_manifest(manifest)
    if not plan.run.has_url:
        servers = {server.role: server for server in manifest.servers}
        resolve_sides(plan.run.spec, folder, servers, engines.__getitem__)
    for role, engine in engines.items():
        record_fingerprint(engine, plan.run.spec.sides[role], folder.server_folder(role), folder.nonce)
    _play_blocks(plan, engines, folder, display)


def _play_blocks(
    plan: BenchPlan, engines: Mapping[Role, Engine], folder: BenchFolder, display: ProgressDisplay
) -> None:
    """Play blocks until time is up and there are enough rounds for a verdict. The four blocks of a load stay together.

    Fewer than `MIN_RATIOS` rounds after the warm-up decide nothing; the time spent on them and on starting servers would be lost.

    Raises:
        EngineError: a server failed, or an answer does not have the requested length.
        EvidenceError: the folder cannot be written.
        ReadAtOnce: answers are not streamed token by token.
    """
    seconds = plan.run.spec.workload.latency_seconds
    clients = {role: engine.client() for role, engine in engines.items()}
    timings: list[Timing] = []
    started, played, rounds, missing = time.monotonic(), 0, 0, MIN_RATIOS
    for together in turns(plan):
        if together[0].round > rounds:
            rounds = together[0].round
            missing = MIN_RATIOS - rounds + first_warm(side_by_side(blocks_of(timings)))
            taken = time.monotonic() - started
            left = max(seconds - taken, missing * taken / rounds, 0)
            display.say(f"{rounds} rounds of {len(plan.loads)} loads played, {left:.0f} s left.")
        if missing <= 0 and time.monotonic() - started >= seconds:
            break
        for turn in together:
            block = _play_in_time(turn, engines[turn.role], clients[turn.role], plan.vocabulary, played, display)
            folder.append_lines(TIMINGS, block)
            timings += block
            played += 1


def _play_in_time(
    turn: Turn, engine: Engine, client: Client, vocabulary: int, number: int, display: ProgressDisplay
) -> list[Timing]:
    """Play one block; replay it if this machine was busy elsewhere and read its tokens too late to time them.

    Raises:
        ReadAtOnce: they were read late every time, so something delays them.
    """
    for pause_s in _PAUSES_S:
        block = _play(turn, engine, client, vocabulary, number)
        try:
            blocks_of(block)
            return block
        except ReadAtOnce as late:
            display.say(f"{late.found} It is played again.", stays=True)
            time.sleep(pause_s)
    block = _play(turn, engine, client, vocabulary, number)
    blocks_of(block)
    return block


def _play(turn: Turn, engine: Engine, client: Client, vocabulary: int, number: int) -> list[Timing]:
    """Play one block on an emptied cache, after caching the shared part, if any."""
    engine.flush_cache()
    shape = turn.shape
    if shape.shared:
        client.stream([prefix(shape, vocabulary, turn.seed)], 1, 1)
    asked = prompts(shape, turn.requests, vocabulary, turn.seed)
    return [
        Timing(
            role=turn.role, again=turn.again, round=turn.round, block=number, shape=shape.name, concurrency=turn.concurrency,
            index=index, **dict(stream),
        )
        for index, stream in enumerate(client.stream(asked, shape.output, turn.concurrency))
    ]  # fmt: skip
