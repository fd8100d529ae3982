"""Runs the arms: starts a server for each set of features that needs one, asks it, and reduces failing sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from assay.harness.backend import Backend
from assay.harness.engines import registry
from assay.harness.engines.base import Engine
from assay.harness.engines.features import Pass, answered, switched
from assay.harness.engines.inside.control import FAULTS, Control
from assay.harness.engines.model import model_shape
from assay.harness.errors import EngineError
from assay.harness.evidence.invariance import InvarianceFolder, InvarianceManifest
from assay.harness.evidence.probes import ProbePass, TracedPlace, record_pass
from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RUN
from assay.harness.judge.invariance_arms import BASE, Arm, ArmJudge, base_of, closed, possible, server_of, smallest
from assay.harness.judge.probe_scores import BASE_AGAIN, bounds, rounds_by_shape
from assay.harness.progress import ProgressDisplay
from assay.harness.run.invariance.plan import InvariancePlan
from assay.harness.run.machine import origin_of
from assay.harness.run.probes import PROBED, AskedArm, ask, switched_on, tracing, write_texts
from assay.harness.run.servers import core_of, make_engine, record_fingerprint
from assay.harness.stats.ddmin import ddmin

# The fault that the probes must detect, as in a run: it affects calls with a cached prefix. And the fault for a server without a
# prefix cache, which affects every call.
_FAULT, _COLD_FAULT = "mask-top-left", "mask-one-key-too-few"
_SENSITIVE: Arm = frozenset({"prefix-cache"})
# Probes that the repeated base sends at once, by reason, so that its batches differ.
_AT_ONCE = {"base again": 2, "trace again": 2, "base third": 4}
# Most sets of features to ask again with a trace.
_TRACED = 4
_Fails = Callable[[Arm], bool | None]
"""True if an arm fails, False if it passes, or None if that is unknown, since it cannot be, or was not shown to be, on."""
# Most sets to try before `ddmin` begins.
_GUESSED = 4


@dataclass
class _Running:
    """A running server."""

    number: int
    features: Arm
    engine: Engine
    folder: Path
    startup_s: float
    stuck: Arm = BASE


@dataclass
class InvarianceSession:
    """One invocation, while it runs.

    The arms, in this order: the base; the base again, for the floor; the base with a seeded fault, for the sensitivity; those of
    the plan; parts of failing arms; and the arms asked again with a trace. A server is kept as long as the next arm can use it.
    """

    plan: InvariancePlan
    folder: InvarianceFolder
    display: ProgressDisplay
    records: dict[Arm, ProbePass] = field(default_factory=dict)
    _passes: dict[Arm, Pass] = field(default_factory=dict)
    _server: _Running | None = None
    _servers: int = 0
    _arms: int = 0
    _unsteady: set[Arm] = field(default_factory=set)

    def run(self) -> None:
        """Run every arm, and reduce the failing ones.

        Raises:
            EngineError: the server of the base failed.
            EvidenceError: the folder cannot be written.
        """
        self.folder.write_manifest(self._manifest())
        try:
            base = self._base("base")
            again = [self._base(why) for why in BASE_AGAIN[: None if rounds_by_shape(self.plan.dtype) else 1]]
            # A comparison that misses a fault in the base's server proves nothing.
            cold = not self._passes[BASE].caches
            self._arm(BASE if cold else _SENSITIVE, "sensitivity", fault=_COLD_FAULT if cold else _FAULT)
            plan, dtype = self.plan, self.plan.dtype
            limits, flags = bounds(base, again, dtype), plan.run.spec.reference.flags
            judge = ArmJudge(self.records, limits, plan.known, dtype, flags)
            for number, arm in enumerate(self.plan.arms, 1):
                self.display.count("arms", number, len(self.plan.arms))
                self._arm(arm, "together" if self.plan.together else "pairs")
            for arm in self.plan.arms:
                self._reduce(arm, judge)
            self._trace(judge)
        finally:
            self._stop()
        self.folder.seal()

    def _base(self, why: str) -> ProbePass:
        """Run the base, without which nothing can be compared."""
        record = self._arm(BASE, why)
        if not record.complete:
            raise EngineError(
                f"The base could not be run: {record.problem}.", "a server without any feature", "read its log"
            )
        return record

    def _differs(self, arm: Arm, judge: ArmJudge) -> bool | None:
        """Return True if an arm differs from its base, False if not, or None if it is unknown or changes between runs."""
        states = {"differs": True, "same": False}
        return None if arm in self._unsteady else states.get(judge.outcome(self.records[arm]).state)

    def _states(self, judge: ArmJudge) -> dict[Arm, bool | None]:
        return {arm: self._differs(arm, judge) for arm in self.records if arm}

    def _reduce(self, arm: Arm, judge: ArmJudge) -> None:
        """Run parts of a failing arm until the smallest failing one and the result of each feature alone are known.

        An explicitly requested arm is not reduced. Neither is an arm that fails only sometimes, because a part that passes may fail
        the next time.
        """
        known = self.plan.known
        states = self._states(judge)
        failed = [each for each, differs in states.items() if differs]
        if arm not in failed or any(len(each) == 1 and each <= arm for each in failed):
            return
        if not any(each < arm for each in failed) and not self._fails_again(arm, judge):
            return

        def fails(features: Arm) -> bool | None:
            if not possible(features, known):
                return None
            if features not in self.records:
                self._arm(features, "reduction")
            return self._differs(features, judge)

        passed = [each for each, differs in states.items() if differs is False]
        smallest = (
            arm if self.plan.together else reduce(arm, fails, failed, passed, lambda features: closed(features, known))
        )
        for id_ in sorted(smallest):
            if (alone := closed([id_], known)) != smallest:
                fails(alone)

    def _fails_again(self, arm: Arm, judge: ArmJudge) -> bool:
        """Ask a failing arm a second time; return False if it then equals its base."""
        if judge.outcome(self._arm(arm, "asked again")).state == "same":
            self._unsteady.add(arm)
        return arm not in self._unsteady

    def _trace(self, judge: ArmJudge) -> None:
        """Ask the smallest differing sets again, each after its base, with a trace of the place where they differ most."""
        failing = {arm: judge.outcome(self.records[arm]) for arm, differs in self._states(judge).items() if differs}
        places = {arm: place for arm in smallest(failing) if (place := failing[arm].place) is not None}
        chosen = list(places.items())[:_TRACED]
        for base, place in dict.fromkeys((base_of(arm, self.plan.known), place) for arm, place in chosen):
            for why in ("trace", "trace again"):
                self._arm(base, why, place)
        for arm, place in chosen:
            self._arm(arm, "trace", place)

    def _arm(self, arm: Arm, why: str, traced: TracedPlace | None = None, fault: str = "") -> ProbePass:
        """Run an arm and record it, perhaps with a trace or a seeded fault. An error in its server is recorded, not raised."""
        number, again = self._arms, _AT_ONCE.get(why, 0)
        self._arms += 1
        begun, problem, startup = time.monotonic(), "", 0.0
        record = ProbePass(number=number, features=tuple(sorted(arm)), why=why, server=self._servers, traced=traced)
        try:
            server, startup = self._server_for(arm)
            begun = time.monotonic()
            seeded = switched_on(server.engine, server.folder, Control(fault=fault)) if fault else nullcontext()
            with seeded, tracing(server.engine, server.folder, record):
                record = self._asked(server, arm, record, again)
        except EngineError as error:
            problem = error.found
            self._stop()
        record = record.model_copy(
            update={"problem": problem, "seconds": time.monotonic() - begun, "startup_s": startup}
        )
        record_pass(self.folder.path, record, self.folder.nonce)
        if arm not in self.records and not fault:
            self.records[arm] = record
        return record

    def _asked(self, server: _Running, arm: Arm, record: ProbePass, again: int) -> ProbePass:
        known = self.plan.every
        base = self.records.get(BASE)
        answers = {reply.probe: reply.decode.tokens for reply in base.replies} if base else {}
        recurrent, longer = model_shape(self.plan.run.model).recurrent, record.why == "base longer"
        evicts = max((known[id_].evicts for id_ in arm), default=0)
        asked = AskedArm(self.plan.load, arm, record.label, answers, again, longer, recurrent, evicts)
        over = ask(server.engine, server.folder, asked)
        texts: tuple[Answer, ...] = ()
        if record.traced is None and not longer:
            texts = write_texts(
                server.engine, self.plan.run.of("greedy"), self.plan.run.spec.workload.token_limit, "batch" in arm
            )
        self._passes.setdefault(arm, over)
        own = base_of(arm, known)
        against = {id_: self._passes.get(BASE if id_ in own else own) for id_ in arm}
        proofs = {id_: switched(known[id_], over, against[id_]) for id_ in sorted(arm)}
        return answered(record, over, proofs).model_copy(update={"server": server.number, "texts": texts})

    def _server_for(self, arm: Arm) -> tuple[_Running, float]:
        """Return a server for an arm, and the seconds that it took to start, or 0 if it was running already."""
        known = self.plan.every
        features, sticky = server_of(arm, known), frozenset(id_ for id_ in arm if known[id_].stays)
        running = self._server
        if running is not None and running.features == features and running.stuck <= sticky:
            running.stuck |= sticky
            return running, 0.0
        self._stop()
        started = self._start(features)
        started.stuck = sticky
        return started, started.startup_s

    def _start(self, features: Arm) -> _Running:
        number, run, known = self._servers, self.plan.run, self.plan.every
        self._servers += 1
        flags: tuple[str, ...] = ()
        environment = {RUN: self.folder.nonce, FAULTS: "1", **PROBED}
        for id_, feature in known.items():
            flags += feature.on if id_ in features else feature.off
            environment |= feature.environment if id_ in features else {}
        if backend := next((known[id_].backend for id_ in features if known[id_].backend), ""):
            run = replace(run, reference=Backend.parse(backend))
        folder = self.folder.server_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        flags = registry.features(run.spec.reference.engine).with_models(flags, run.model, folder)
        # The features that the fingerprint states as requested.
        side = run.spec.reference.launched_with(environment, flags).model_copy(update={"backend": str(run.reference)})
        engine = make_engine(
            run,
            "reference",
            folder,
            self.folder.log(number),
            cpu_core=core_of(run.spec.device),
            eager=False,
            side=side,
        )
        what = f"starting a server with {', '.join(sorted(features)) or 'no feature'}"
        with self.display.waiting(what, engine.last_step):
            engine.start()
        record_fingerprint(engine, side, folder, self.folder.nonce)
        self._server = _Running(number, features, engine, folder, engine.startup_s or 0.0)
        return self._server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.engine.stop()
            self._server = None

    def _manifest(self) -> InvarianceManifest:
        plan = self.plan
        origin: dict[str, Any] = vars(origin_of(plan.run, plan.command, self.folder.nonce))
        return InvarianceManifest(
            **origin,
            backend=str(plan.run.reference),
            features=tuple(plan.known),
            not_covered=dict(plan.not_covered),
            arms=tuple(tuple(sorted(arm)) for arm in plan.arms),
            dtype=plan.dtype,
            lengths={probe.id: (len(probe.ids), probe.shared, probe.depth) for probe in plan.load.probes},
        )


def reduce(
    failing: Arm, fails: _Fails, failed: Collection[Arm], passed: Collection[Arm], of: Callable[[Arm], Arm]
) -> Arm:
    """Return the smallest subset of a failing arm's features that was seen to fail, by delta debugging.

    Every test may start a server, so a passing set excludes its subsets, and the sets that all failing arms share are tried first.

    Args:
        of: completes a set of features to one that can be switched on.
    """
    seen: dict[Arm, bool | None] = {failing: True}
    seen.update(dict.fromkeys(failed, True) | dict.fromkeys(passed, False))

    def test(features: Arm) -> bool:
        arm = of(features)
        if arm not in seen:
            excluded = not arm or any(seen[other] is False and arm <= other for other in seen)
            seen[arm] = False if excluded else fails(arm)
        return seen[arm] is True

    known = min((arm for arm, state in seen.items() if state and arm <= failing), key=len)
    for guess in _guesses(known, failed, passed, of):
        if test(guess):
            known = guess
            break
    # Completion adds back required features, so a part is tested as it is run.
    return of(frozenset(ddmin(sorted(known), lambda some: test(frozenset(some)))))


def _guesses(failing: Arm, failed: Collection[Arm], passed: Collection[Arm], of: Callable[[Arm], Arm]) -> Iterator[Arm]:
    """Yield the smallest sets that nothing excludes, starting with those that most failing arms contain."""
    sets = {of(frozenset(chosen)) for size in (1, 2) for chosen in combinations(sorted(failing), size)}
    left = [arm for arm in sets if arm < failing and not any(arm <= other for other in passed)]
    left.sort(key=lambda arm: (-sum(arm <= other for other in failed), len(arm), sorted(arm)))
    yield from left[:_GUESSED]
