"""The result of timing a kernel without a server. `SCHEMA` follows `assay.harness.schema.RULE`."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.schema import RULE, Part
from assay.harness.verdict import Decided, Finding, Verdict

SCHEMA: Literal["assay.kernel-timing/2"] = "assay.kernel-timing/2"


class ShapeTiming(Part):
    """A kernel on calls of one shape: its time against the reference kernel's, and its own error on the same calls."""

    phase: str
    new: tuple[int, ...] = Field(description="new tokens of each sequence")
    prefix: tuple[int, ...] = Field(description="cached prefix of each sequence, in tokens")
    heads: tuple[int, int] = Field(description="q heads and kv heads")
    head_dim: int
    dtype: str
    layers: tuple[int, ...] = Field(
        description="layers whose calls had this shape: all were compared with the oracle, the first was timed"
    )
    repeats: int = Field(description="each runs both kernels twice")
    reference_s: float = Field(description="median")
    candidate_s: float
    ratio: float = Field(description="candidate over reference")
    low: float
    high: float
    floor: float = Field(description="the reference over itself")
    verdict: Verdict
    reference_tflops: float = Field(description="of the work that the correct mask needs, 1e12 operations a second")
    candidate_tflops: float
    reference_share: float | None = Field(description="of the device's limit; null where none is known")
    candidate_share: float | None
    own_error: float | None = Field(
        description="largest own error as a multiple of its bound; null if it is not finite"
    )
    right: bool = Field(description="whether every own error was within its bound")


class KernelTiming(Decided):
    __doc__ = f"The result of timing a kernel: regression if anything is wrong or slower than the bound. {RULE}"

    schema_id: Literal["assay.kernel-timing/2"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    candidate: str
    reference: str
    device: str
    bound: float
    shapes: tuple[ShapeTiming, ...]
    refused: tuple[str, ...] = Field(description="calls that a kernel refused, with its reasons")
    findings: tuple[Finding, ...] = Field(description="a wrong kernel, or a speed that cannot be")
