"""The probes' answers: what a server computed for known tokens, in prefill and in decode, under stated conditions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RUN_AGAIN, RunFile, RunRecord
from assay.harness.schema import Record

CONDITIONS: Mapping[str, frozenset[str]] = {
    "cold": frozenset(),
    "cached": frozenset({"prefix-cache"}),
    "batched": frozenset({"batch"}),
    "continued": frozenset({"batch", "conversation", "prefix-cache"}),
}
"""How a run asks both servers: condition -> features of its requests (`assay.harness.engines.sglang.features`). The first one is
the base; the last one goes on from an earlier turn, in a batch."""


class Scores(Record):
    """Log-probabilities at consecutive positions of a sequence, in nats, or NaN if the server did not return one.

    Attributes:
        first: index in the sequence of the first predicted token.
        tokens: the sequence's tokens from there on.
        own: log-probability of each of them.
        ids: the most probable tokens at each position, best first.
        logprobs: their log-probabilities.
    """

    first: int = 0
    tokens: tuple[int, ...] = ()
    own: tuple[float, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[float, ...], ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Refuse scores with incomplete positions or tokens."""
        if not len(self.tokens) == len(self.own) == len(self.ids) == len(self.logprobs):
            raise ValueError("a position without a token, or without log-probabilities")
        if any(len(row) != len(ids) for ids, row in zip(self.ids, self.logprobs, strict=True)):
            raise ValueError("a token without a log-probability")
        return self

    @property
    def end(self) -> int:
        """The index after the last predicted token."""
        return self.first + len(self.tokens)


class ProbeReply(Record):
    """The answer to one probe.

    Attributes:
        probe: id of the probe.
        prompt_tokens: tokens of its prompt.
        cached_tokens: prompt tokens from the prefix cache.
        foreign_tokens: those of them that no earlier prompt had in the same places.
        host_tokens: cached tokens that came from the host's memory.
        prefill: its prompt, teacher-forced.
        decode: its generated tokens.
        finish: reason why it ended: "length" or "stop".
        retractions: number of retractions.
        verifications: number of passes that verified drafts, or 0 without speculation.
        pieces: number of parts in which the answer arrived, or 1 if it was not streamed.
    """

    probe: str
    prompt_tokens: int
    cached_tokens: int
    foreign_tokens: int = 0
    host_tokens: int = 0
    prefill: Scores = Scores()
    decode: Scores = Scores()
    finish: str = ""
    retractions: int = 0
    verifications: int = 0
    pieces: int = 1


class TracedPlace(Record):
    """The place that a pass was traced for.

    Attributes:
        probe: id of the probe.
        index: index of the predicted token in its sequence, from 0. The last traced token is the one before it.
    """

    probe: str
    index: int


class ProbePass(RunRecord):
    """One pass over the probes: of a variant of ``assay invariance``, or of a server of a run under a condition.

    Attributes:
        number: position in the order of passes; 0 is the base.
        features: ids of the features that were on; in a run, those of its requests.
        why: why it was run: "base", "base again", "base longer", "base third", "pairs", "together", "reduction", "asked
            again" for a failed arm, "sensitivity", or, for a traced pass, "trace" or "trace again"; in a run "sides".
        replies: replies in the order of the probes, or empty if the arm failed.
        texts: greedy answers to a few prompts, which end where the model ends them.
        seen: evidence that a feature was on, by feature id; a feature without an entry was not shown to be on.
        unseen: why a feature was not shown to be on, by feature id.
        problem: why it did not finish, or empty if it did.
        server: number of the server that ran it.
        seconds: duration of the pass, without the server's startup.
        startup_s: startup time of its server in seconds, in the server's first arm; 0 in the others.
        traced: the place that it was repeated for with the trace on, under `label`, or None for an untraced pass.
    """

    number: int
    features: tuple[str, ...] = ()
    why: str
    replies: tuple[ProbeReply, ...] = ()
    texts: tuple[Answer, ...] = ()
    seen: dict[str, str] = Field(default_factory=dict)
    unseen: dict[str, str] = Field(default_factory=dict)
    problem: str = ""
    server: int = 0
    seconds: float = 0.0
    startup_s: float = 0.0
    traced: TracedPlace | None = None

    @property
    def label(self) -> str:
        """The name of its trace, which also appears in its requests' ids."""
        return f"{self.number:03d}"

    @property
    def complete(self) -> bool:
        """True if it finished."""
        return bool(self.replies) and not self.problem


_PASSES = RunFile("probes/*.json", ProbePass, RUN_AGAIN, durable=False)


def record_pass(folder: Path, made: ProbePass, nonce: str) -> None:
    """Record a pass. Raises EvidenceError if the disk is full or not writable."""
    (folder / "probes").mkdir(parents=True, exist_ok=True)
    _PASSES.write(folder, made, nonce, process=made.label)


def passes_of(folder: Path, nonce: str) -> list[ProbePass]:
    """Read all passes in the order of asking. Raises EvidenceError if one is damaged, or of another run."""
    return list(_PASSES.read_each(folder, nonce).values())
