"""A run: check everything, start two servers, ask both the same, leave the evidence. The verdict is read from the evidence."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from assay.evals.greedy import MAX_TOKENS as GREEDY_TOKENS
from assay.evals.greedy import greedy_prompts
from assay.evals.mmlu import load_questions
from assay.evals.questions import PROMPT_HEADER, Question, parse_answer, prompt_hash
from assay.harness.baselines import status_of
from assay.harness.collect import cause, layer_suite
from assay.harness.collect.logit_scoring import score_role
from assay.harness.config import FLAGS, RunSpec
from assay.harness.engines import memory
from assay.harness.engines.backend import Backend
from assay.harness.engines.base import ChatRequest, Engine, Reply, start_together
from assay.harness.engines.launch import Launch, check_engine_args
from assay.harness.engines.model import resolve_model
from assay.harness.engines.remote import RemoteServer
from assay.harness.engines.sglang import SGLangServer
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence import manifest as made
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path
from assay.harness.evidence.manifest import Failure, Manifest, ServerManifest
from assay.harness.evidence.records import ROLES, Answer, Item, Role, Suite
from assay.harness.progress import ProgressDisplay

COLD_SHARE, COLD_MOST = 8, 16
"""One question in eight, at most sixteen, is asked with an empty cache, so that both conditions occur in every run."""
TOP_LOGPROBS = 5
"""Alternatives recorded at each greedy position; vLLM's ``check_logprobs_close`` looks at as many."""
FLOOR_REPEAT = 1
GATE_FLAGS = ("baselines", "growth", "reference_from")
"""Flags that only a run has which is held against the accepted baselines."""
SCORED = 8
"""Greedy prompts whose logits are scored: some 200 positions under each of two conditions."""


@dataclass(frozen=True)
class Plan:
    """A run that was checked: nothing in it can be wrong use any more."""

    spec: RunSpec
    model: Path
    items: tuple[Item, ...]

    def of(self, suite: Suite) -> list[Item]:
        """The items of a suite, in order."""
        return [item for item in self.items if item.suite == suite]

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles that need a server: where nobody is asked for answers, the candidate stands beside the reference's."""
        return ROLES if {"mmlu", "greedy"} & set(self.spec.suites) else ("reference",)


def prepare(spec: RunSpec) -> Plan:
    """Check backends, model and questions; start nothing.

    Raises:
        UsageError: an unknown backend, an incomplete model, questions that cannot be read.
    """
    Backend.checked("--reference", spec.reference)
    Backend.checked("--candidate", spec.candidate)
    check_engine_args(spec.engine_arg)
    model = resolve_model(spec.model, spec.engine_arg)
    asked, layered = "mmlu" in spec.suites, layer_suite.wanted(spec)
    some = max(spec.questions if asked else 0, layer_suite.COLD + layer_suite.WARM if layered else 0, 1)
    questions = load_questions(spec.data, some)
    items = [_item("mmlu", q) for q in questions[: spec.questions] if asked]
    items += [_item("layers", q) for q in questions[: layer_suite.COLD + layer_suite.WARM] if layered]
    if {"greedy", "logits"} & set(spec.suites):
        greedy = greedy_prompts(questions, spec.greedy_prompts, spec.synthetic)
        items += [
            Item(suite="greedy", id=id_, prompt=prompt, prompt_hash=prompt_hash(prompt)) for id_, prompt in greedy
        ]
    return Plan(spec, model, tuple(items))


def _item(suite: Suite, q: Question) -> Item:
    return Item(
        suite=suite, id=q.id, prompt=q.prompt, prompt_hash=q.prompt_hash, group=q.group, subject=q.subject, expected=q.answer
    )  # fmt: skip


def default_folder(spec: RunSpec) -> Path:
    """``runs/<time>-<candidate>`` for a run that was given no folder."""
    name = "".join(c if c.isalnum() or c in "_-." else "-" for c in spec.candidate)
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"


def open_folder(plan: Plan, path: Path, command: str = "run") -> RunFolder:
    """Begin the run in `path`, or go on with it.

    Args:
        plan: the checked run.
        path: of its folder.
        command: the command that repeats it: "run", or "gate" if it is held against the accepted baselines.

    Raises:
        UsageError: `path` holds something else.
    """
    spec = plan.spec
    keys = [key for key in FLAGS if command == "gate" or key not in GATE_FLAGS]
    manifest = Manifest(
        run_id=path.resolve().name,
        created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        spec=spec.model_dump(mode="json"),
        command=shlex.join(["assay", command, *given_flags(spec, keys)]),
        packages=made.installed_packages(),
        hardware=made.hardware(spec.device),
        python=sys.version.split()[0],
        git=made.git_state(Path.cwd()),
        model=spec.model,
        model_hash=made.hash_model(plan.model),
        items_hash=made.hash_items(plan.items),
    )
    return RunFolder.open(path, manifest, plan.items)


def given_flags(spec: RunSpec, keys: Sequence[str] = FLAGS) -> list[str]:
    """The flags of `keys` that repeat a run: those that differ from their default, and always both roles."""
    flags = []
    for key in keys:
        field, value = RunSpec.model_fields[key], getattr(spec, key)
        if value is None or not (field.is_required() or value != field.default):
            continue
        if isinstance(value, tuple) and key != "engine_arg":
            value = ",".join(map(str, value))
        flags += [f"--{key.replace('_', '-')}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return flags


def collect(plan: Plan, folder: RunFolder, display: ProgressDisplay, ready: Sequence[Engine] = ()) -> None:
    """Ask both servers what is not answered yet. What ends a run early is written down, not raised.

    Args:
        plan: the checked run.
        folder: where answers go, one by one.
        display: shows the progress.
        ready: both servers, if they run already; else they are started here, and stopped.

    Raises:
        KeyboardInterrupt: after the servers were stopped and the interruption was written down.
    """
    with recorded(folder):
        answered = {answer.key for answer in folder.answers()}
        waiting = [role for role in asked_roles(plan, folder) if _pending(plan, folder, role, answered)]
        if not waiting:
            display.say("Everything was answered before." if plan.items else "Nothing is asked.")
        elif ready:
            _interview_all(ready, plan, folder, answered, display)
        else:
            engines = [make_engine(plan, folder, role) for role in waiting]
            groups = [engines] if len(engines) == 1 or together(plan) else [[engine] for engine in engines]
            for group in groups:
                display.say(f"Starting {' and '.join(f'{e.role} {e.backend}' for e in group)}.")
                with running(group, plan.spec.device):
                    _interview_all(group, plan, folder, answered, display)
        if layer_suite.wanted(plan.spec):
            cause.find_cause(folder, plan.spec, display)


def asked_roles(plan: Plan, folder: RunFolder) -> tuple[Role, ...]:
    """Roles that are asked: not a reference whose answers are those of an accepted baseline."""
    status = status_of(folder)
    stored = status is not None and status.stored_reference
    return ("candidate",) if stored else plan.roles


def _looked_into(plan: Plan, folder: RunFolder) -> Role | None:
    """The role whose server the layer suite looks into; None if there is no layer suite."""
    return asked_roles(plan, folder)[0] if layer_suite.wanted(plan.spec) else None


def _pending(plan: Plan, folder: RunFolder, role: Role, answered: set[tuple[str, str, str, int]]) -> bool:
    """Whether a role's server still has anything to do."""
    inside = layer_suite.wanted(plan.spec) and layer_suite.looked(folder, role) is None
    return inside or bool(_open(plan, role, answered)) or bool(_unscored(plan, folder, role))


@contextmanager
def recorded(folder: RunFolder) -> Iterator[None]:
    """Write down how long it took, and what ended it: an engine that failed, a full disk, Ctrl-C (which goes on)."""
    begun = time.monotonic()
    failure: Failure | None = None
    try:
        yield
    except EngineError as error:
        failure = Failure(kind="engine", message=str(error))
    except EvidenceError as error:
        failure = Failure(kind="disk", message=str(error))
    except KeyboardInterrupt:
        failure = Failure(
            kind="interrupted", message="The run was interrupted. The same command with its --out goes on with it."
        )
        raise
    except Exception as error:
        failure = Failure(kind="bug", message=f"A bug in assay: {error!r}")
        raise
    finally:
        progress = folder.progress()
        seconds = progress.seconds + time.monotonic() - begun
        folder.update(progress.model_copy(update={"seconds": seconds, "failure": failure}))
        folder.write_counters()


def together(plan: Plan) -> bool:
    """Whether both servers run at the same time: as asked, or as memory allows."""
    spec = plan.spec
    if spec.servers != "auto":
        return spec.servers == "together"
    if Backend.parse(spec.reference).is_url or Backend.parse(spec.candidate).is_url:
        return True
    size, free = memory.model_bytes(str(plan.model)), memory.available_bytes(spec.device)
    return memory.hold_both(spec.device, size, free, memory.mem_fraction(spec.engine_arg))


def make_engine(plan: Plan, folder: RunFolder, role: Role) -> Engine:
    """The engine of a role: a server to start, or one that runs already."""
    spec = plan.spec
    backend = spec.reference if role == "reference" else spec.candidate
    if Backend.parse(backend).is_url:
        return RemoteServer(role=role, url=backend, request_timeout=spec.request_timeout)
    inside = layer_suite.settings(spec, plan.model, role, looked_into=role == _looked_into(plan, folder))
    return SGLangServer(
        Launch(
            role=role,
            backend=backend,
            model=str(plan.model),
            device=spec.device,
            engine_args=spec.engine_arg,
            evidence=folder.server_folder(role),
            log=folder.log(role),
            startup_timeout=spec.startup_timeout,
            request_timeout=spec.request_timeout,
            decode_backend=Backend.parse(spec.reference).delegate,
            cpu_core=core_of(spec.device, ROLES.index(role)),
            eager=eager(spec),
            extra=inside,
        )
    )


def eager(spec: RunSpec) -> bool:
    """Whether both servers run without CUDA graphs: a kernel of the contract resolves its paging in Python, so a decode phase of
    its own cannot be captured; and where nobody is asked for answers, decode is to be looked into.
    """
    roles = (Backend.parse(spec.reference), Backend.parse(spec.candidate))
    own = {phase for backend in roles if backend.is_kernel for phase in backend.phases}
    return "decode" in own or not {"mmlu", "greedy"} & set(spec.suites)


def core_of(device: str, number: int = 0) -> int | None:
    """The core that a CPU server computes on, so that two of them do not share one if there are more; None on a GPU."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)] if device == "cpu" else None


@contextmanager
def running(engines: Sequence[Engine], device: str) -> Iterator[None]:
    """Engines started, and stopped whatever happens.

    On CUDA they start one after the other: SGLang sizes its KV cache by the memory that is free before and after it loads the
    weights, and gives up if another server takes some in between.

    Raises:
        EngineError: one of them did not start.
    """
    start_together(engines, at_once=device != "cuda")
    try:
        yield
    finally:
        for engine in engines:
            engine.stop()


def _interview_all(
    engines: Sequence[Engine],
    plan: Plan,
    folder: RunFolder,
    answered: set[tuple[str, str, str, int]],
    display: ProgressDisplay,
) -> None:
    """Ask all engines at once, each from a thread of its own; the first failure stops the servers, and so the other threads."""
    for engine in engines:
        _note_server(folder, engine)
        started = f", ready in {engine.startup_s:.0f} s" if engine.startup_s else ""
        display.say(f"{engine.role.capitalize()} is {engine.backend} in {engine.label}{started}.")
    _side_by_side(engines, lambda engine: interview(engine, plan, folder, answered, display))
    for engine in engines:
        _score(engine, plan, folder, display)


def _unscored(plan: Plan, folder: RunFolder, role: Role) -> list[Role]:
    """Roles whose logits a role's server has still to score: where it is the only one, those of both, if it is looked into."""
    spec = plan.spec
    asked = asked_roles(plan, folder)
    if "logits" not in spec.suites or not plan.of("greedy") or Backend.parse(spec.reference).is_url or Backend.parse(spec.candidate).is_url:
        return []
    if asked != ROLES and not layer_suite.wanted(spec):
        return []  # nowhere to score the role that has no server
    scored = (role,) if asked == ROLES else ROLES
    return [one for one in scored if not logits_path(folder.path, one, 0).exists()]


def _score(engine: Engine, plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Score the reference's tokens; after the interviews, since the candidate is asked for what the reference said."""
    for role in _unscored(plan, folder, engine.role):
        assert isinstance(engine, SGLangServer)
        items, answers = plan.of("greedy")[:SCORED], folder.answers()
        if role == engine.role:
            score_role(engine, items, answers, folder.path, display)
        else:
            with layer_suite.substituted_everywhere(folder.server_folder(engine.role)):
                score_role(engine, items, answers, folder.path, display, role)


def _side_by_side(engines: Sequence[Engine], do: Callable[[Engine], None]) -> None:
    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(do, engine) for engine in engines]
        whole = False
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in finished:
                    future.result()
            whole = True
        finally:
            if not whole:
                for engine in engines:
                    engine.stop()


def manifest_of(engine: Engine) -> ServerManifest:
    """What a server that runs says of itself.

    Raises:
        EngineError: it does not answer.
    """
    return ServerManifest(
        role=engine.role,
        backend=engine.backend,
        engine=engine.label,
        claimed_phases=Backend.parse(engine.backend).phases,
        launch_command=engine.launch_command,
        startup_s=engine.startup_s,
        arguments=engine.arguments(),
    )


def _note_server(folder: RunFolder, engine: Engine) -> None:
    """Write down what a server said of itself, in place of what an earlier server of that role said."""
    server = manifest_of(engine)
    progress = folder.progress()
    others = tuple(s for s in progress.servers if s.role != engine.role)
    folder.update(progress.model_copy(update={"servers": (*others, server)}))


@dataclass(frozen=True)
class _Sitting:
    """Items that are asked at once, and how."""

    title: str
    items: list[Item]
    repeat: int
    max_tokens: int
    top_logprobs: int = 0


def _sittings(
    plan: Plan, role: Role, answered: set[tuple[str, str, str, int]]
) -> tuple[list[_Sitting], list[_Sitting]]:
    """What is still to be asked of a role: before the shared header is cached, and after."""
    questions = plan.of("mmlu")
    greedy = plan.of("greedy") if "greedy" in plan.spec.suites else []  # else only their logits are scored
    cold = min(len(questions) // COLD_SHARE, COLD_MOST)
    limit = plan.spec.token_limit
    # The floor is asked in another order, so that the run-to-run difference includes that of the batches.
    floor = [("greedy again", greedy[::-1], FLOOR_REPEAT)] if role == "reference" else []

    def pending(items: list[Item], repeat: int) -> list[Item]:
        return [item for item in items if (item.suite, role, item.id, repeat) not in answered]

    before = [_Sitting("questions, cold", pending(questions[:cold], 0), 0, limit)]
    after = [_Sitting("questions", pending(questions[cold:], 0), 0, limit)]
    for title, items, repeat in [("greedy", greedy, 0), *floor]:
        after.append(_Sitting(title, pending(items, repeat), repeat, GREEDY_TOKENS, TOP_LOGPROBS))
    return [s for s in before if s.items], [s for s in after if s.items]


def _open(plan: Plan, role: Role, answered: set[tuple[str, str, str, int]]) -> list[Item]:
    before, after = _sittings(plan, role, answered)
    return [item for sitting in (*before, *after) for item in sitting.items]


def interview(
    engine: Engine, plan: Plan, folder: RunFolder, answered: set[tuple[str, str, str, int]], display: ProgressDisplay
) -> None:
    """Ask a server everything that is open: some questions with an empty cache, then the rest with the header cached.

    Raises:
        EngineError: the server failed; what it answered before is in the folder.
        EvidenceError: the folder cannot be written.
    """
    before, after = _sittings(plan, engine.role, answered)
    for sitting in before:
        # One at a time: in a wave, whoever comes second finds the header that the first one left in the cache.
        for number in range(len(sitting.items)):
            engine.flush_cache()
            _ask(engine, sitting, slice(number, number + 1), 1, folder, display)
    if after:
        engine.flush_cache()
        engine.ask([ChatRequest(PROMPT_HEADER, max_tokens=1)], 1, lambda index, reply: None)
    for sitting in after:
        _ask(engine, sitting, slice(None), plan.spec.concurrency, folder, display)
    if layer_suite.wanted(plan.spec) and layer_suite.looked(folder, engine.role) is None:
        prompts = [item.prompt for item in plan.of("layers")]
        if engine.role == _looked_into(plan, folder):
            layer_suite.look(engine, folder, prompts, plan.spec, display)
        else:
            layer_suite.follow(engine, folder, prompts)


def _ask(
    engine: Engine, sitting: _Sitting, part: slice, concurrency: int, folder: RunFolder, display: ProgressDisplay
) -> None:
    """Ask a part of a sitting at once."""
    items = sitting.items[part]
    done = part.start or 0

    def keep(index: int, reply: Reply) -> None:
        nonlocal done
        folder.append(_answer(engine.role, sitting, items[index], reply))
        done += 1
        display.count(f"{engine.role}: {sitting.title}", done, len(sitting.items))

    engine.ask(
        [ChatRequest(item.prompt, sitting.max_tokens, sitting.top_logprobs) for item in items], concurrency, keep
    )


def _answer(role: Role, sitting: _Sitting, item: Item, reply: Reply) -> Answer:
    return Answer(
        suite=item.suite,
        role=role,
        item=item.id,
        repeat=sitting.repeat,
        prompt_hash=item.prompt_hash,
        request_id=reply.request_id,
        text=reply.text,
        parsed=parse_answer(reply.text) if item.suite == "mmlu" else None,
        finish_reason=reply.finish_reason,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        latency_s=reply.latency_s,
        tokens=reply.tokens,
    )
