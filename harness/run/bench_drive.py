"""Playing a bench: both servers run, blocks are played in turn until time is up, and everything is recorded as it arrives."""

from __future__ import annotations

import time
from collections.abc import Mapping

from assay.evals.loads import prefix, prompts
from assay.harness.engines.base import ChatRequest, Engine, answers
from assay.harness.engines.client import Client, Stream
from assay.harness.evidence.bench_folder import LENGTHS, TIMINGS, BenchFolder, BenchManifest, Timing
from assay.harness.evidence.nonce import RUN
from assay.harness.evidence.records import Answer
from assay.harness.judge.blocks import blocks_of, first_warm, side_by_side
from assay.harness.progress import ProgressDisplay
from assay.harness.run.bench_plan import BenchPlan, Turn, turns
from assay.harness.run.machine import origin_of
from assay.harness.run.plan import Plan
from assay.harness.run.servers import core_of, make_engine, manifest_of, record_fingerprint, running
from assay.harness.sides import ROLES, Role
from assay.harness.stats.ratio import MIN_RATIOS


def make_engines(plan: BenchPlan, folder: BenchFolder) -> dict[Role, Engine]:
    """Return the engines of both roles, not started.

    On the CPU both compute on the same core, since only one is loaded at a time: two cores are rarely equally fast.
    """
    run = plan.run
    return {
        role: make_engine(
            run,
            role,
            folder.server_folder(role),
            folder.log(role),
            cpu_core=core_of(run.spec.device),
            eager=plan.eager,
            side=run.spec.sides[role].launched_with({RUN: folder.nonce}, plan.arguments),
        )
        for role in ROLES
    }


def bench(plan: BenchPlan, folder: BenchFolder, display: ProgressDisplay) -> None:
    """Start both servers, time them, and leave the evidence in the folder.

    Raises:
        EngineError: a server failed.
        EvidenceError: the folder cannot be written.
    """
    engines = make_engines(plan, folder)
    display.say("Starting both servers.")
    with running(list(engines.values()), plan.run.spec.device, display):
        for engine in engines.values():
            display.say(f"{engine.role.capitalize()} is {engine.backend} in {engine.label}.")
        measure_servers(plan, engines, folder, display)
    folder.write_counters()
    folder.seal()


def measure_servers(
    plan: BenchPlan, engines: Mapping[Role, Engine], folder: BenchFolder, display: ProgressDisplay
) -> None:
    """Time two running servers: first how long answers are when their length is not forced, then blocks until time is up.

    Raises:
        EngineError: a server failed.
        EvidenceError: the folder cannot be written.
    """
    folder.write_manifest(_manifest(plan, folder, engines))
    for role, engine in engines.items():
        record_fingerprint(engine, plan.run.spec.sides[role], folder.server_folder(role), folder.nonce)
    for engine in engines.values() if plan.run.of("greedy") else ():
        folder.append_lines(LENGTHS, _lengths(engine, plan.run))
    play(plan, engines, folder, display)


def _lengths(engine: Engine, run: Plan) -> list[Answer]:
    """Measure how long answers are when their length is not forced: a candidate with longer answers shows only here."""
    workload = run.spec.workload
    engine.flush_cache()
    requests = [ChatRequest.of(item, workload.token_limit) for item in run.of("greedy")]
    return answers(engine, requests, max(workload.latency_concurrency))


def _manifest(plan: BenchPlan, folder: BenchFolder, engines: Mapping[Role, Engine]) -> BenchManifest:
    return BenchManifest(
        **vars(origin_of(plan.run, plan.command, folder.nonce)),
        seed=plan.seed,
        shapes=plan.shapes,
        eager=plan.eager,
        servers=tuple(manifest_of(engine) for engine in engines.values()),
    )


def play(plan: BenchPlan, engines: Mapping[Role, Engine], folder: BenchFolder, display: ProgressDisplay) -> None:
    """Play blocks until time is up and there are enough rounds for a verdict. The four blocks of a load stay together.

    Fewer than `MIN_RATIOS` rounds after the warm-up decide nothing; the time spent on them and on starting servers would be lost.

    Raises:
        EngineError: a server failed, or an answer does not have the requested length.
        EvidenceError: the folder cannot be written, or answers are not streamed token by token.
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
            block = _play(turn, engines[turn.role], clients[turn.role], plan.vocabulary, played)
            folder.append_lines(TIMINGS, block)
            timings += block
            played += 1


def _play(turn: Turn, engine: Engine, client: Client, vocabulary: int, number: int) -> list[Timing]:
    """Play one block on an emptied cache, after caching the shared part, if any."""
    engine.flush_cache()
    shape = turn.shape
    if shape.shared:
        client.stream([prefix(shape, vocabulary, turn.seed)], 1, 1)
    asked = prompts(shape, turn.requests, vocabulary, turn.seed)
    streams = client.stream(asked, shape.output, turn.concurrency)
    return [_timing(turn, number, index, stream) for index, stream in enumerate(streams)]


def _timing(turn: Turn, number: int, index: int, stream: Stream) -> Timing:
    return Timing(
        role=turn.role,
        again=turn.again,
        round=turn.round,
        block=number,
        shape=turn.shape.name,
        concurrency=turn.concurrency,
        index=index,
        sent_s=round(stream.sent_s, 6),
        latency_s=round(stream.latency_s, 6),
        chunk_s=tuple(round(s, 6) for s in stream.chunk_s),
        chunk_tokens=stream.chunk_tokens,
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=stream.completion_tokens,
        cached_tokens=stream.cached_tokens,
    )
