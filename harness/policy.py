"""The policy of a run: the limits that its verdict applies, and where each was set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from assay.harness.sides import Settings

WIDEST_MARGIN = 0.10
"""Largest margin of accuracy that a policy may set."""
WIDEST_LOGITS_LIMIT = 0.25
"""Largest mean KL that a policy may allow, in nats: about twice what K and V in four bits would explain."""

# The widest limit of each line, and the reason against a wider one.
_WIDEST = {
    "margin": (WIDEST_MARGIN, "a wider margin would pass a candidate that loses more than one answer in ten"),
    "length_bound": (0.5, "a wider one would pass answers of half or twice the length"),
    "greedy_margin": (0.25, "a wider one would pass a candidate that answers something else"),
    "logits_limit": (WIDEST_LOGITS_LIMIT, "a wider one would pass a candidate that answers something else"),
}

SuiteName = Literal["accuracy", "greedy", "logits", "layers", "latency"]


class Policy(Settings):
    """The limits of a verdict: the keys of ``[policy]`` in an ``assay.toml``."""

    margin: float = Field(
        0.02, gt=0, description="largest loss of accuracy that still passes, as a fraction; at most 0.1"
    )
    alpha: float = Field(0.05, gt=0, le=0.2, description="error rate of each interval and test")
    greedy_margin: float = Field(
        0.10, gt=0, description="largest share of greedy texts that may differ by more than rounding; at most 0.25"
    )
    logits_limit: float | None = Field(
        None,
        gt=0,
        description="largest mean KL of the logits, in nats, at most 0.25; by default what rounding explains",
    )
    latency_bound: float = Field(
        1.10, ge=1, description="largest ratio of times, candidate over reference, that still passes"
    )
    length_bound: float = Field(
        0.05, gt=0, description="largest change of the length of answers that passes, as a fraction; at most 0.5"
    )
    require: tuple[SuiteName, ...] = Field((), description="suites that a pass requires, separated by commas")
    bounds: dict[str, float] = Field(
        {},
        description="largest error (relative L1), by the noise that a kernel declares; exact for kernels that declare none",
    )
    envelope_tokens: int = Field(
        256, ge=128, le=1_000_000, description="length in tokens up to which calls must be compared for a pass"
    )
    fingerprint: str = Field("", description="accepted fingerprint, which the candidate must match; by default none")
    given_by: dict[str, str] = Field({}, description="where each line that was given came from")

    _split = field_validator("require", mode="before")(lambda value: split_words(value))

    @field_validator("bounds")
    @classmethod
    def _positive(cls, bounds: dict[str, float]) -> dict[str, float]:
        if any(bound <= 0 for bound in bounds.values()):
            raise ValueError("bounds above 0")
        return bounds

    @field_validator(*_WIDEST)
    @classmethod
    def _decides_something(cls, limit: float | None, info: ValidationInfo) -> float | None:
        widest, why = _WIDEST[info.field_name or ""]
        if limit is not None and limit > widest:
            raise ValueError(f"at most {widest:g}: {why}")
        return limit

    def line(self, name: str) -> str:
        """Return a line of policy and its source: "margin = 0.05 (default)". `name` may be a key of `bounds`."""
        if name in POLICY:
            return f"{name} = {getattr(self, name)} ({self.given_by.get(name, 'default')})"
        return f"bounds.{name} = {self.bounds[name]} ({self.given_by.get('bounds', 'default')})"

    def weakened(self, defaults: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the lines that are more lenient than their defaults, which a reader should not have to know.

        Args:
            defaults: defaults of the run's device, if they differ from those of the fields.
        """
        weaker = {
            name: getattr(self, name) > Policy.model_fields[name].default
            for name in ("margin", "alpha", "greedy_margin", "latency_bound", "length_bound")
        }
        weaker["logits_limit"] = self.logits_limit is not None
        weaker["require"] = "require" in self.given_by and not self.require
        weaker["envelope_tokens"] = self.envelope_tokens < defaults["envelope_tokens"]
        return tuple(self.line(name) for name in POLICY if weaker.get(name))


POLICY = tuple(name for name in Policy.model_fields if name != "given_by")
"""The lines of a policy."""
FRACTIONS = ("margin", "greedy_margin", "length_bound", "alpha")
"""Lines that people also state in points or percent."""


def split_words(value: Any) -> Any:
    """Split "accuracy,greedy" at its commas, and drop repeated words; return anything but text and lists unchanged."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    return tuple(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else value
