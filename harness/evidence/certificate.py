"""The certificate: which seeded faults were shown to be caught, by which suite, in which envelope."""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.extras import DISTRIBUTION
from assay.harness.schema import RULE, Part, read_json
from assay.harness.verdict import Decided, Verdict

SCHEMA: Literal["assay.certificate/1"] = "assay.certificate/1"
FILE = "certificate.json"
"""Name of a certificate's file."""
Level = Literal["op", "server"]
Kind = Literal["fault", "equivalent", "honest"]
Outcome = Literal["caught", "missed", "not shown", "quiet", "false alarm", "crash", "time-out"]
HIDDEN = 3.0
"""Largest change by a fault, as a multiple of what the declared noise costs, that the noise hides. On the CPU, half of the cells of
the op-level matrix have a bound of 3.2 times what "int8_qk" costs there or more."""
_COMPLETE: tuple[Outcome, ...] = ("caught", "missed", "not shown", "quiet", "false alarm")
"""Outcomes of an examination that came to its end."""


class CertifiedEnvelope(Part):
    """The envelope of a certificate: a fault elsewhere may go unseen.

    Attributes:
        level: "op" for the op-level matrix, "server" for a pair of servers.
        device: "cpu" or "cuda".
        machine: name of the GPU; empty on a CPU.
        engine: engine and version; empty for the op level.
        reference: backend of the reference; empty for the op level.
        model: model; empty for the op level.
        model_hash: hash of the model's files; empty for the op level.
        candidate: the kernel on whose outputs faults were seeded; empty for PyTorch's attention.
        code: hash of its code, 12 hexadecimal digits; empty for PyTorch's attention.
        phases: phases that it computes; empty, as in older certificates, for all.
        noise: noise family that it declares; empty for rounding alone.
        dtypes: dtypes of q, k and v.
        torch: version of PyTorch.
        calls: calls of the op-level matrix; 0 for servers.
        layers: layers.
        heads: q heads.
        most_new: most new tokens of a sequence.
        longest: most tokens of a sequence, cached ones included.
        largest_batch: most sequences of a call.
        seed: seed of the matrix or of the questions.
        suites: what looked at each fault.
        read_out: whether kernels with a fault that was caught were read.
        version: version of assay.
        source: hash of assay's source code.
    """

    level: Level
    device: str
    machine: str = ""
    engine: str = ""
    reference: str = ""
    model: str = ""
    model_hash: str = ""
    candidate: str = ""
    code: str = ""
    phases: tuple[str, ...] = ()
    noise: str = ""
    dtypes: tuple[str, ...]
    torch: str
    calls: int = 0
    layers: int
    heads: int
    most_new: int
    longest: int
    largest_batch: int
    seed: int = 0
    suites: tuple[str, ...]
    read_out: bool = False
    version: str = ""
    source: str


class Look(Part):
    """One suite's view of a fault.

    Attributes:
        suite: "op-level", "layers", "logits", "greedy" or "accuracy".
        caught: whether it flagged the fault.
        after: calls or questions up to the first that was flagged; None if none was, or if it is unknown.
        of: calls or questions that it looked at.
    """

    suite: str
    caught: bool
    after: int | None = None
    of: int


class Examined(Part):
    """The outcome of one fault, equivalent fault or honest kernel.

    Attributes:
        id: of the fault, or "honest-" and the noise family, or "honest-candidate" for the certified kernel itself.
        kind: "fault", "equivalent" or "honest".
        title: name in prose.
        links: public reports of such a bug.
        restricted: where it was seeded, in words; empty for everywhere.
        outcome: "caught" or "missed"; "not shown" if it changes nothing in this envelope; for what must not be flagged, "quiet" or
            "false alarm"; "crash" or "time-out" if the examination did not come to its end.
        looks: what each suite saw.
        named: whether a finding has its name; None if there is no such name, or nothing was caught.
        pinned: whether the findings give its layers, heads, phases and restriction, and no others; None if nothing was caught.
        found: ids of the findings.
        where: where the first finding lies, in its own words.
        read: what was read off the kernel, in a sentence; empty if that states nothing, None if the kernel was not read.
        read_exact: whether what was read gives every output that was seen; None if the kernel was not read.
        effect: of a missed fault, the largest change of a cell as a multiple of what the declared noise costs there; None without a
            declared noise, or where it was not measured.
        why: why it was not caught, or how it crashed.
        seed: seed of what it draws.
        seconds: time that the examination took.
    """

    id: str
    kind: Kind
    title: str
    links: tuple[str, ...] = ()
    restricted: str = ""
    outcome: Outcome
    looks: tuple[Look, ...] = ()
    named: bool | None = None
    pinned: bool | None = None
    findings: tuple[str, ...] = ()
    where: str = ""
    read: str | None = None
    read_exact: bool | None = None
    effect: float | None = None
    why: str = ""
    seed: int = 0
    seconds: float

    @property
    def hidden(self) -> bool:
        """True if it was missed because the noise that the kernel declares hides it: a correct kernel may err as much."""
        return self.outcome == "missed" and self.effect is not None and self.effect <= HIDDEN


class Certificate(Decided):
    __doc__ = f"Which seeded faults the harness catches in an envelope, and what it wrongly flags there. {RULE}"

    schema_id: Literal["assay.certificate/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    made: str = Field(description="ISO 8601, UTC")
    envelope: CertifiedEnvelope
    examined: tuple[Examined, ...]
    left: tuple[str, ...] = Field((), description="ids that were not examined")
    not_asked: tuple[str, ...] = Field((), description="ids of the catalogue that were left out with --fault")

    @property
    def minutes(self) -> float:
        """Time that all examinations took."""
        return sum(examined.seconds for examined in self.examined) / 60

    def having(self, *outcomes: Outcome) -> list[Examined]:
        """List what ended with one of these outcomes."""
        return [examined for examined in self.examined if examined.outcome in outcomes]


def installed_version() -> str:
    """Return the version of assay, as installed; "not installed" where it is on the path only."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"


def source_hash() -> str:
    """Hash assay's source code, which every result is bound to, to 12 hexadecimal digits."""
    root = Path(__file__).parents[2]
    total = sha256()
    for part in sorted(path for path in root.iterdir() if path.is_dir()):
        for path in sorted(part.resolve().rglob("*.py")):  # in a checkout, the parts are links
            name = path.relative_to(part.resolve())
            total.update(f"{part.name}/{name}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


def verdict_on(examined: tuple[Examined, ...], left: tuple[str, ...]) -> Verdict:
    """Return the verdict on the harness: "pass" if every fault that shows was caught and nothing else was flagged.

    A fault that the declared noise hides is not held against the harness; the certificate lists it as missed.

    Args:
        examined: what was examined.
        left: ids that were not.
    """
    outcomes = {task.outcome for task in examined if not task.hidden}
    if outcomes & {"missed", "false alarm"}:
        return "regression"
    return "inconclusive" if left or not outcomes or outcomes - set(_COMPLETE) else "pass"


def read_certificate(path: Path) -> Certificate:
    """Read a certificate from its file.

    Raises:
        EvidenceError: it is missing or damaged.
    """
    return read_json(path, Certificate, "make it again: assay certify")
