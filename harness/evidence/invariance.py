"""The evidence of ``assay invariance``: the plan, and each arm's answers.

``manifest.json`` is the plan, ``arms/<number>.json`` one pass over the probes in one server with some features on, and
``servers/<number>/`` a server's files. ``end.json`` seals all of it once the whole plan was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.folder import EndedFolder
from assay.harness.evidence.manifest import Origin
from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RUN_AGAIN, RunFile, RunRecord
from assay.harness.reading import whole_file
from assay.harness.schema import Record

FOLDER = "invariance"


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


class ArmRecord(RunRecord):
    """One pass over the probes.

    Attributes:
        number: position in the order of arms; 0 is the base, 1 the base again.
        features: ids of the features that were on.
        why: why it was run: "base", "base again", "base longer", "base third", "pairs", "singles", "exactly", "reduction", "asked
            again" for a failed arm, "sensitivity", or, for a traced pass, "trace" or "trace again".
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


class InvarianceManifest(Origin):
    """The planned comparison.

    Attributes:
        backend: attention backend of the base.
        features: ids of the features that arms switch.
        not_covered: features that cannot be switched here: id -> reason.
        arms: the planned arms after the base, each as the ids of its features.
        mode: how the arms were chosen: "pairs", "singles" or "exactly".
        minutes: the budget, or 0 without one.
        dtype: dtype of the activations, such as "float32".
        lengths: probe id -> tokens in its prompt, in its shared prefix, and in its answer.
    """

    backend: str
    features: tuple[str, ...]
    not_covered: dict[str, str]
    arms: tuple[tuple[str, ...], ...]
    mode: str
    minutes: float
    dtype: str
    lengths: dict[str, tuple[int, int, int]]


_ARMS = RunFile("arms/*.json", ArmRecord, RUN_AGAIN, durable=False)


class InvarianceFolder(EndedFolder[InvarianceManifest]):
    """The folder of an invocation."""

    kind = InvarianceManifest

    def server_folder(self, number: int) -> Path:
        """Return the folder of a server's evidence."""
        return self.path / "servers" / f"{number:02d}"

    def log(self, number: int) -> Path:
        """Return the log of a server."""
        return self.path / f"server-{number:02d}.log"

    def fingerprint(self, number: int) -> Fingerprint | None:
        """Read a server's fingerprint, if it reported one. Raises EvidenceError if it is damaged, or of another run."""
        return FINGERPRINT.read(self.server_folder(number), self.nonce)

    def write(self, arm: ArmRecord) -> None:
        """Record an arm. Raises EvidenceError if the disk is full or not writable."""
        (self.path / "arms").mkdir(exist_ok=True)
        _ARMS.write(self.path, arm, self.nonce, process=f"{arm.number:03d}")

    def arms(self) -> Sequence[ArmRecord]:
        """Read all arms in the order of running. Raises EvidenceError if one is damaged, or of another run."""
        return list(_ARMS.read_each(self.path, self.nonce).values())


def compares_features(folder: Path) -> bool:
    """Return True if ``assay invariance`` wrote the folder. Only its manifest lists features that are not covered."""
    try:
        return b'"not_covered"' in whole_file(folder / "manifest.json")
    except (OSError, EvidenceError):
        return False
