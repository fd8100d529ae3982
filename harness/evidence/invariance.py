"""The evidence of ``assay invariance``: what was asked for, and what each arm answered.

``manifest.json`` is the plan, ``arms/<number>.json`` one pass over the probes in one server with some features on, and
``servers/<number>/`` what a server left. ``end.json`` seals all of it once everything was run that was planned.
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
    """Log-probabilities at consecutive positions of a sequence, in nats; NaN where the server gave none.

    Attributes:
        first: index in the sequence of the first token that is predicted.
        tokens: the tokens of the sequence there.
        own: log-probability of each.
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
        """Refuse scores with positions or tokens that something is missing of."""
        if not len(self.tokens) == len(self.own) == len(self.ids) == len(self.logprobs):
            raise ValueError("a position without a token, or without log-probabilities")
        if any(len(row) != len(ids) for ids, row in zip(self.ids, self.logprobs, strict=True)):
            raise ValueError("a token without a log-probability")
        return self

    @property
    def end(self) -> int:
        """The index behind the last token that is predicted."""
        return self.first + len(self.tokens)


class ProbeReply(Record):
    """The answer to one probe.

    Attributes:
        probe: id of the probe.
        prompt_tokens: tokens of its prompt.
        cached_tokens: those that came from the prefix cache.
        host_tokens: those of these that were found in the host's memory.
        prefill: its prompt, teacher-forced.
        decode: what it generated.
        finish: reason why it ended: "length" or "stop".
        retractions: times that it was retracted.
        verifications: passes that verified drafts; 0 without speculation.
        pieces: parts in which the answer came; 1 where it came whole.
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
    """What a pass was traced for.

    Attributes:
        probe: id of the probe.
        index: of the predicted token in its sequence, from 0; the token before it is the last that is traced.
    """

    probe: str
    index: int


class ArmRecord(RunRecord):
    """One pass over the probes.

    Attributes:
        number: in the order in which arms were run; 0 is the base, 1 the base again.
        features: ids of the features that were on.
        why: why it was run: "base", "base again", "base longer", "base third", "pairs", "singles", "exactly", "reduction", "asked
            again" of an arm that failed, "sensitivity", or, of a pass that was traced, "trace" or "trace again".
        replies: in the order of the probes; empty where it failed.
        texts: greedy answers to a few prompts, which end where the model ends them.
        seen: what shows that a feature was on, by its id; a feature without an entry was not shown to be on.
        unseen: why a feature was not shown to be on, by its id.
        problem: why it was not run to its end; empty if it was.
        server: number of the server in which it ran.
        seconds: of the pass, without the start of the server.
        startup_s: seconds that its server took to start, in the server's first arm; 0 in the others.
        traced: the place for which it was asked again with the trace on, under `label`; None for a pass that was not.
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
        """The name of its trace, which its requests' ids have too."""
        return f"{self.number:03d}"

    @property
    def complete(self) -> bool:
        """True if it was run to its end."""
        return bool(self.replies) and not self.problem


class InvarianceManifest(Origin):
    """What was to be compared.

    Attributes:
        backend: attention backend of the base.
        features: ids of the features that arms switch.
        not_covered: features that cannot be switched here: id -> why.
        arms: the planned arms after the base, each as the ids of its features.
        mode: how the arms were chosen: "pairs", "singles" or "exactly".
        minutes: the budget; 0 for none.
        dtype: of the activations, such as "float32".
        lengths: id of each probe -> tokens of its prompt, of its shared prefix, and of its answer.
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
    """The folder of one invocation."""

    kind = InvarianceManifest

    def server_folder(self, number: int) -> Path:
        """Return the folder of a server's evidence."""
        return self.path / "servers" / f"{number:02d}"

    def log(self, number: int) -> Path:
        """Return the log of a server."""
        return self.path / f"server-{number:02d}.log"

    def fingerprint(self, number: int) -> Fingerprint | None:
        """Read what a server really served; None if it did not tell. Raises EvidenceError if that is damaged, or of another run."""
        return FINGERPRINT.read(self.server_folder(number), self.nonce)

    def write(self, arm: ArmRecord) -> None:
        """Record an arm. Raises EvidenceError if the disk is full or not writable."""
        (self.path / "arms").mkdir(exist_ok=True)
        _ARMS.write(self.path, arm, self.nonce, process=f"{arm.number:03d}")

    def arms(self) -> Sequence[ArmRecord]:
        """Read all arms, in the order in which they were run. Raises EvidenceError if one is damaged, or of another run."""
        return list(_ARMS.read_each(self.path, self.nonce).values())


def compares_features(folder: Path) -> bool:
    """Return True if a folder is one of ``assay invariance``, whose manifest says what is not covered, as no other does."""
    try:
        return b'"not_covered"' in whole_file(folder / "manifest.json")
    except (OSError, EvidenceError):
        return False
