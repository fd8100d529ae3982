"""The state machine that checks a trace: what begins must end, and an engine's steps come in their order.

The rules follow from MLC-LLM at 79d603f (July 2026): ``EngineImpl::Step`` polls its actions in order and returns after the first
one that processed requests; ``cpp/serve/model.cc`` begins a forward pass in the KV cache, calls the model once, and ends it; logits
are sampled after a softmax. A request's sequence is added to the KV cache, or forked from one whose prefix it shares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from assay.harness.ingest.trace import mlc_lines as lines
from assay.harness.ingest.trace.mlc_lines import Kind
from assay.harness.ingest.trace.model import Violation

KEPT = 5
"""Most violations of one rule that are kept with their places; the others are counted."""
RULES = {
    "trace-begin-not-closed": "A begin without its end",
    "trace-end-not-begun": "An end without its begin",
    "trace-decode-before-prefill": "A decode before the prefill of its request",
    "trace-sequence-count": "Not one sequence added or forked for a request",
    "trace-action-order": "Actions polled out of order",
    "trace-call-order": "Calls of a forward pass out of order",
    "trace-cut-off": "The trace ends early",
}
"""Rules by id, with their titles."""

_RULED = lines.MODEL_CALLS | {
    lines.ADD, lines.FORK, lines.BEGIN, lines.END, lines.EMBED, lines.SOFTMAX, *lines.SAMPLE,
}  # fmt: skip
"""Calls that a rule is about."""

Key = TypeVar("Key", bound=Hashable)


@dataclass
class Violations:
    """The violations found so far: the first `KEPT` of each rule, and how many there are."""

    kept: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, rule: str, where: str, says: str, *places: int) -> None:
        """Count a violation, and keep it if it is one of the first of its rule."""
        self.counts[rule] = self.counts.get(rule, 0) + 1
        if self.counts[rule] <= KEPT:
            self.kept.append(Violation(rule, where, says, tuple(place for place in places if place)))


class Balance(Generic[Key]):
    """Begins that wait for their ends, by what they have in common. The last begin is closed first."""

    def __init__(self) -> None:
        self._open: dict[Key, list[int]] = defaultdict(list)

    def begin(self, key: Key, place: int) -> None:
        """Begin something at a place."""
        self._open[key].append(place)

    def end(self, key: Key) -> int | None:
        """End something, and return the place where it began, or None if it had not begun."""
        waiting = self._open.get(key)
        if not waiting:
            return None
        begun = waiting.pop()
        if not waiting:
            del self._open[key]
        return begun

    def waiting(self) -> list[tuple[Key, int]]:
        """List what has not ended, in the order of its begin."""
        return sorted(((key, place) for key, places in self._open.items() for place in places), key=lambda one: one[1])


class EngineMachine:
    """Checks the lines of an MLC-LLM engine trace, one after the other."""

    def __init__(self) -> None:
        self.found = Violations()
        self._request, self._segment = 0, 0
        self._segment_at = self._pass_at = self._model_at = 0
        self._added_at = 0
        self._sequences: list[int] = []
        self._prefilled = self._softmaxed = self._answered = False
        self._action, self._action_at, self._worked = "", 0, False

    def feed(self, kind: Kind, at: int) -> None:
        """Take the next line that was understood.

        Args:
            kind: what it is.
            at: its number.
        """
        if kind.kind == "call":
            self._call(kind.name, at)
        elif kind.kind == "action":
            self._poll(kind.name, at)
        elif kind.kind == "segment-begin":
            self._begin_segment(at)
        elif kind.kind == "segment-end":
            self._end_segment(at)
        elif kind.kind == "add-request":
            self._end_request(at)
            self._request, self._segment, self._added_at = self._request + 1, 0, at
        elif kind.name == lines.RELOAD:
            self._end_request(at)
            self._added_at = 0
        elif kind.kind == "output":
            self._end_step(at)
            self._answered = True

    def finish(self, last: int) -> None:
        """End the file after so many lines: what is open stays open because of that, so it is one violation."""
        open_ = [(at, what) for at, what in ((self._pass_at, "a forward pass"), (self._segment_at, "a segment")) if at]
        polled = self._unpolled()
        if self._added_at and not (open_ or polled or self._answered):
            open_ = [(self._added_at, "the request")]
        if open_ or polled:
            at, what = open_[0] if open_ else (self._action_at, "a step of the engine")
            self.found.add(
                "trace-cut-off", self._where(), f"{what} that begins here does not end in the file", at, last
            )
        if self._added_at and not open_ and not polled:
            self._check_sequences()

    def _where(self) -> str:
        request = (
            f"request {self._request}"
            if self._added_at
            else "before the first request"
            if not self._request
            else "no request"
        )
        return f"{request}, segment {self._segment}" if self._segment_at else request

    def _end_request(self, at: int) -> None:
        self._close_segment(at)
        self._end_step(at)
        if self._added_at:
            self._check_sequences()
        self._sequences, self._prefilled, self._softmaxed, self._answered = [], False, False, False

    def _check_sequences(self) -> None:
        if len(self._sequences) != 1:
            says = f"{len(self._sequences)} sequences were added or forked for the request, where one is expected"
            self.found.add(
                "trace-sequence-count", f"request {self._request}", says, self._added_at, *self._sequences[:3]
            )

    def _begin_segment(self, at: int) -> None:
        self._close_segment(at)
        self._end_step(at)
        self._segment, self._segment_at = self._segment + 1, at

    def _close_segment(self, at: int) -> None:
        if self._segment_at:
            self.found.add(
                "trace-begin-not-closed",
                self._where(),
                "the segment has no end before the next part begins",
                self._segment_at,
                at,
            )
            self._segment_at = 0

    def _end_segment(self, at: int) -> None:
        self._end_step(at)
        if not self._segment_at:
            self.found.add("trace-end-not-begun", self._where(), "a segment ends that had not begun", at)
        self._segment_at = 0

    def _unpolled(self) -> bool:
        """Return True if a step of the engine is under way that neither computed something nor polled all actions."""
        return bool(self._action) and not self._worked and self._action != lines.POLLING_ORDER[-1]

    def _end_step(self, at: int) -> None:
        if self._pass_at:
            says = "the forward pass has no end before the next part begins"
            self.found.add("trace-begin-not-closed", self._where(), says, self._pass_at, at)
            self._pass_at = 0
        if self._unpolled():
            says = f"the engine polls nothing after {self._action}, which computed nothing"
            self.found.add("trace-action-order", self._where(), says, self._action_at, at)
        self._action, self._worked = "", False

    def _poll(self, name: str, at: int) -> None:
        order = lines.POLLING_ORDER
        done = not self._action or self._worked or self._action == order[-1]
        expected = order[0] if done else order[order.index(self._action) + 1]
        if self._pass_at:
            says = f"the forward pass has no end before {name} is polled"
            self.found.add("trace-begin-not-closed", self._where(), says, self._pass_at, at)
            self._pass_at = 0
        if name != expected:
            says = f"the engine polls {name} where {expected} is next"
            self.found.add("trace-action-order", self._where(), says, self._action_at, at)
        self._action, self._action_at, self._worked, self._softmaxed = name, at, False, False

    def _call(self, name: str, at: int) -> None:
        if name not in _RULED:
            return
        if name in (lines.ADD, lines.FORK):
            self._sequences.append(at)
        elif name == lines.BEGIN:
            if self._pass_at:
                says = "the forward pass has no end before the next one begins"
                self.found.add("trace-begin-not-closed", self._where(), says, self._pass_at, at)
            self._pass_at, self._model_at = at, 0
        elif name == lines.END:
            if not self._pass_at:
                self.found.add("trace-end-not-begun", self._where(), "a forward pass ends that had not begun", at)
            elif not self._model_at:
                self._order("the forward pass ends, and the model was not called in it", at, self._pass_at)
            self._pass_at = self._model_at = 0
        elif name in lines.MODEL_CALLS:
            self._model_call(name, at)
        else:
            self._around_the_pass(name, at)

    def _model_call(self, name: str, at: int) -> None:
        self._worked = True
        if not self._pass_at:
            self._order(f"{name} is called outside of a forward pass", at)
        elif self._model_at:
            self._order(f"{name} is the second call of the model in one forward pass", at, self._model_at)
        self._model_at = at
        if name in lines.DECODES and self._action != lines.DECODE:
            says = f"{name} is called, and the engine is not in {lines.DECODE}"
            self.found.add("trace-action-order", self._where(), says, self._action_at, at)
        if name in lines.PREFILLS:
            self._prefilled = True
        elif not self._prefilled:
            says = f"{name} is called, and nothing was prefilled"
            self.found.add("trace-decode-before-prefill", self._where(), says, self._added_at, at)

    def _around_the_pass(self, name: str, at: int) -> None:
        if self._pass_at:
            self._order(f"{name} is called inside of a forward pass", at, self._pass_at)
        if name == lines.SOFTMAX:
            if not self._worked:
                self._order(f"{name} is called, and the step computed no logits", at)
            self._softmaxed = True
        elif name in lines.SAMPLE:
            if not self._softmaxed:
                self._order(f"{name} is called before {lines.SOFTMAX}", at)
            self._softmaxed = False

    def _order(self, says: str, at: int, before: int = 0) -> None:
        self.found.add("trace-call-order", self._where(), says, before, at)
