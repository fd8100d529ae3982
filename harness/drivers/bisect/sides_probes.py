"""Probing sides with servers: what the reference said is kept, and each probe starts one server and compares it."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from assay.evals.greedy import MAX_TOKENS
from assay.harness.config import RUNS, SIDES_FLAGS, RunSpec
from assay.harness.drivers.bisect import Outcome
from assay.harness.drivers.bisect.sides import SidePair
from assay.harness.drivers.bisect.sides_search import Votes, find_sets
from assay.harness.drivers.bisect.sides_task import (
    EVIDENCE,
    Difference,
    Evidence,
    SidesBisection,
    SidesProbe,
    SidesQuestion,
    command_of,
    findings_of,
)
from assay.harness.engines.base import ChatRequest, Engine, answers, cache_header
from assay.harness.engines.environments import interpreter, python_of
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence import jsonl
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import FLOOR_REPEAT, Answer
from assay.harness.evidence.run_file import RUN, new_nonce
from assay.harness.files import is_unused, lock_folder, write_whole
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.facts import variables
from assay.harness.judge.answers import pair
from assay.harness.judge.greedy_suite import decide_share, texts_apart
from assay.harness.judge.logits import compare_roles
from assay.harness.judge.logits_suite import judge_logits
from assay.harness.judge.paired_accuracy import accuracy_of
from assay.harness.progress import ProgressDisplay
from assay.harness.run.logit_scoring import score
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.preflight import check_environment
from assay.harness.run.questions import TOP_LOGPROBS
from assay.harness.run.servers import core_of, make_engine, record_fingerprint, running
from assay.harness.schema import read_json
from assay.harness.sides import Role, Side
from assay.harness.verdict import Verdict

_QUESTION, _PROBES, _ANSWERS = "question.json", "probes.jsonl", "reference.jsonl"
# Every so many greedy prompts the reference answers twice, for its floor.
_FLOOR_EVERY = 4
# Differences between fingerprints that follow from where a merged model folder lies.
_OF_PLACE = ("arguments.model_path", "arguments.tokenizer_path")
# What a verdict, its value and the limit of it come to.
_Judged = tuple[Verdict, float | None, float | None]


class _Prober:
    """Starts a server for each set of differences, and compares it with what the reference said.

    Args:
        spec: both sides, and what they are asked.
        sides: their differences.
        folder: the bisection's.
        run: nonce of its evidence.
        display: shows the progress.

    Attributes:
        by: what showed that the whole candidate is broken, and decides about every set; None until it was probed.
    """

    def __init__(self, spec: RunSpec, sides: SidePair, folder: Path, run: str, display: ProgressDisplay) -> None:
        self._spec, self._sides, self._folder, self._run, self._display = spec, sides, folder, run, display
        self.by: Evidence | None = None

    def side(self, chosen: Collection[Difference]) -> Side:
        """Return the reference with some differences."""
        return self._sides.applied(chosen, self._folder / "models")

    def probe(self, chosen: Sequence[Difference]) -> SidesProbe:
        """Serve the reference with some differences, and compare it with the reference."""
        begun, labels = time.monotonic(), tuple(each.label for each in chosen)
        kinds = (self.by,) if self.by else EVIDENCE
        self._ask_reference(kinds[:2])
        try:
            made = self._compared(chosen, kinds)
        except (EngineError, UsageError) as error:  # a side that cannot be served says nothing about what it computes
            made = SidesProbe(applied=(), outcome="skip", problem=error.found)
        return made.model_copy(update={"applied": labels, "seconds": time.monotonic() - begun})

    def _compared(self, chosen: Sequence[Difference], kinds: Sequence[Evidence]) -> SidesProbe:
        side = self.side(chosen)
        plan = prepare(self._spec.model_copy(update={"candidate": side}))
        python_of(side, self._display.say)
        engine = self._engine(plan, "candidate", side)
        with running([engine], self._spec.device, self._display):
            if chosen and all(map(_is_seen, chosen)) and self._serves_the_same(engine, side):
                return SidesProbe(applied=(), outcome="good", by="fingerprint")
            verdicts: dict[Evidence, Verdict] = {}
            for kind in kinds:
                if kind == "answers" and set(verdicts.values()) == {"pass"}:
                    break
                # What nothing cheaper decides about needs questions, and these the reference's answers.
                self._ask_reference((kind,))
                verdicts[kind], value, limit = self._judge(plan, kind, self._ask(engine, plan, "candidate", kind))
                if verdicts[kind] == "regression":
                    return SidesProbe(applied=(), outcome="bad", by=kind, value=value, limit=limit)
        # A set without the loss of the whole candidate is good; the whole is only if something shows it.
        if self.by or verdicts.get("answers") == "pass" or set(verdicts.values()) == {"pass"}:
            return SidesProbe(applied=(), outcome="good", by=[*verdicts][-1], value=value, limit=limit)
        problem = f"neither a loss nor its absence is shown by {', '.join(verdicts)}"
        return SidesProbe(applied=(), outcome="skip", problem=problem)

    def _engine(self, plan: Plan, role: Role, side: Side) -> Engine:
        place = self._folder / "servers" / role
        return make_engine(
            plan, role, place, self._folder / f"{role}.log", cpu_core=core_of(self._spec.device, role == "candidate"),
            eager=plan.has_decode_kernel, side=side.launched_with({RUN: self._run}),
        )  # fmt: skip

    def _serves_the_same(self, engine: Engine, side: Side) -> bool:
        """Return True if a server's fingerprint is the reference's in everything that was observed of either."""
        own = record_fingerprint(engine, side, self._folder / "servers" / "candidate", self._run)
        reference: Fingerprint | None = FINGERPRINT.read(self._folder / "servers" / "reference", self._run)
        if own is None or reference is None:
            return False
        diff = compare_fingerprints(reference, own)
        differ = [each for each in diff.differences if each.part != "unseen" and not each.name.startswith(_OF_PLACE)]
        return not (differ or diff.lost or diff.unread)

    def _ask_reference(self, kinds: Collection[Evidence]) -> None:
        """Ask the reference what it was not asked yet; its server is started for it."""
        missing = [kind for kind in kinds if not self._has(kind)]
        if not missing:
            return
        plan = prepare(self._spec)
        engine = self._engine(plan, "reference", self._spec.reference)
        with running([engine], self._spec.device, self._display):
            place = self._folder / "servers" / "reference"
            record_fingerprint(engine, self._spec.reference, place, self._run)
            for kind in missing:
                jsonl.append(self._folder / _ANSWERS, self._ask(engine, plan, "reference", kind))

    def _has(self, kind: Evidence) -> bool:
        if kind == "logits":
            return logits_path(self._folder, "reference", FLOOR_REPEAT).exists()
        suite = "greedy" if kind == "texts" else "accuracy"
        return any(answer.suite == suite for answer in self._answers())

    def _answers(self) -> list[Answer]:
        return jsonl.read(self._folder / _ANSWERS, Answer)

    def _ask(self, engine: Engine, plan: Plan, role: Role, kind: Evidence) -> list[Answer]:
        """Ask a server for one kind of evidence; return its answers. Logits are written to the folder."""
        workload = self._spec.workload
        if kind == "logits":
            for repeat in (0, FLOOR_REPEAT) if role == "reference" else (0,):
                score(engine, plan.of("logits"), [], self._folder, self._display, role, repeat, self._run)
            return []
        if kind == "texts":
            items = plan.of("greedy")
            asks = [ChatRequest.of(item, MAX_TOKENS, TOP_LOGPROBS) for item in items]
            again = items[::_FLOOR_EVERY] if role == "reference" else []
            asks += [ChatRequest.of(item, MAX_TOKENS, TOP_LOGPROBS, FLOOR_REPEAT) for item in again]
        else:
            asks = [ChatRequest.of(item, workload.token_limit) for item in plan.of("accuracy")]
        cache_header(engine)
        return answers(engine, asks, workload.concurrency)

    def _judge(self, plan: Plan, kind: Evidence, own: Sequence[Answer]) -> _Judged:
        """Judge a server by one kind of evidence, as a run does."""
        policy, noise = self._spec.policy, [plan.reference.noise, plan.candidate.noise]
        if kind == "logits":
            scorings: tuple[tuple[Role, int], ...] = (("reference", 0), ("candidate", 0), ("reference", FLOOR_REPEAT))
            read = [read_logits(logits_path(self._folder, *scoring), self._run) for scoring in scorings]
            suite = judge_logits(compare_roles(*read), policy, noise, synthetic=self._spec.workload.synthetic)
            decided = [(each.value, each.bound) for each in suite.metrics if each.id == suite.decided_by]
            return suite.verdict, *(decided or [(None, None)])[0]
        reference = self._answers()
        if kind == "texts":
            pairs = pair(plan.of("greedy"), [*reference, *own], "greedy").pairs
            apart, of = texts_apart(pairs, reference, noise)
            verdict = decide_share(apart, of, policy.greedy_margin, policy.alpha) if of else "inconclusive"
            return verdict, apart / of if of else None, policy.greedy_margin
        measured = accuracy_of(pair(plan.of("accuracy"), [*reference, *own]).pairs, plan.rule)
        return measured.verdict, measured.loss, policy.margin


def _is_seen(difference: Difference) -> bool:
    """Return True if a fingerprint shows whatever this difference changes: of variables and packages it knows some."""
    return difference.kind in ("backend", "flag", "config", "file") or (
        difference.kind == "variable" and bool(variables({difference.name: "1"}))
    )


def bisect_sides(spec: RunSpec, out: Path | None, display: ProgressDisplay) -> tuple[SidesBisection, Path]:
    """Find the smallest sets of differences between two sides that break the candidate; resume in its folder.

    Args:
        spec: two sides that assay starts, and what they are asked.
        out: the folder; by default named after the question.
        display: shows the progress.

    Returns:
        The result and its folder.

    Raises:
        UsageError: the sides do not differ or cannot be served, or the folder holds something else.
        EvidenceError: the folder cannot be written.
    """
    begun = time.monotonic()
    plan = prepare(spec)
    check_environment(plan, display.say)
    ours, theirs = spec.reference, spec.candidate
    pythons = None
    if (ours.interpreter, ours.packages) != (theirs.interpreter, theirs.packages):
        pythons = interpreter(python_of(ours) or sys.executable), interpreter(python_of(theirs) or sys.executable)
    sides = SidePair(ours, theirs, (plan.models["reference"], plan.models["candidate"]), pythons)
    differences = {each.label: each for each in sides.differences()}
    if not differences:
        raise UsageError(
            "The two sides do not differ in anything that is served.",
            "two sides with differences",
            "see --candidate-arg and others",
        )
    folder, run, lock = _open(spec, out, tuple(differences))
    probes = jsonl.read(folder / _PROBES, SidesProbe)
    prober = _Prober(spec, sides, folder, run, display)
    prober.by = next((probe.by for probe in probes if probe.outcome == "bad"), None)
    display.say(f"{len(differences)} differences in {folder}; {len(probes)} probes are already done.")

    def probe(names: frozenset[str]) -> Outcome:
        chosen = [difference for label, difference in differences.items() if label in names]
        made = prober.probe(chosen)
        prober.by = prober.by or (made.by if made.outcome == "bad" else None)
        jsonl.append(folder / _PROBES, [made])
        probes.append(made)
        display.say(_line(len(probes), made, len(differences)))
        return made.outcome

    votes = Votes(probe, [(frozenset(each.applied), each.outcome) for each in probes])
    searched = find_sets(list(differences), votes)
    of_sets = [prober.side([differences[name] for name in names]) for names in searched.sets]
    commands = [command_of(spec.model_copy(update={"candidate": side})) for side in of_sets]
    result = SidesBisection(
        **searched._asdict(), reference=spec.recorded().reference, candidate=spec.recorded().candidate, device=spec.device,
        differences=tuple(differences.values()), left_out=sides.left_out, steady=votes.steady, probes=tuple(probes),
        findings=findings_of(searched, differences, probes, commands),
        reproduce=shlex.join(["assay", "bisect", "sides", *spec.given_flags(SIDES_FLAGS)]), seconds=time.monotonic() - begun,
    )  # fmt: skip
    del lock
    return result, folder


def _open(spec: RunSpec, out: Path | None, labels: tuple[str, ...]) -> tuple[Path, str, object]:
    """Open the folder of a bisection: a new one, or that of the same question. Returns it, its nonce and its lock."""
    asked = spec.recorded().model_dump(mode="json")
    folder = out or RUNS / f"bisect-{hashlib.sha256(spec.recorded().model_dump_json().encode()).hexdigest()[:10]}"
    lock = lock_folder(folder)
    if (folder / _QUESTION).exists():
        question = read_json(folder / _QUESTION, SidesQuestion, "start again with another --out")
        if (question.spec, question.differences) != (asked, labels):
            raise UsageError(f"{folder} holds another bisection.", "the same one", "use another --out")
    elif is_unused(folder):
        question = SidesQuestion(run=new_nonce(), spec=asked, differences=labels)
        write_whole(folder / _QUESTION, question.model_dump_json(indent=1))
    else:
        raise UsageError(
            f"{folder} is not empty and holds no bisection.", "a new folder", "name another one with --out"
        )
    jsonl.drop_cut_line(folder / _PROBES)
    jsonl.drop_cut_line(folder / _ANSWERS)
    return folder, question.run, lock


def _line(number: int, made: SidesProbe, of: int) -> str:
    """Say what a probe showed."""
    what = {0: "the reference itself", of: "all differences"}.get(len(made.applied), "")
    what = what or (", ".join(made.applied) if len(made.applied) <= 2 else f"{len(made.applied)} of {of} differences")
    measured = f" ({made.by}: {made.value:.2g}, limit {made.limit:.2g})" if None not in (made.value, made.limit) else ""
    return f"Probe {number}: {what}: {made.outcome}{measured}{f': {made.problem}' if made.problem else ''}."
