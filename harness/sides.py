"""A side of a run: what serves in one role. The treatment is what differs between the two sides, as asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

BUILTIN_MODEL = "tiny"
Device = Literal["cpu", "cuda"]
Engine = Literal["sglang"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
"""The registry of the engines that assay starts. Each is a package of `assay.harness.engines`, with a module ``profile``."""
Role = Literal["reference", "candidate"]
ROLES: tuple[Role, Role] = ("reference", "candidate")


@dataclass(frozen=True)
class EngineProfile:
    """The facts of an engine that are known without starting it.

    Attributes:
        title: its name.
        references: by device, the attention backend that is the reference by default.
        kernels: by attention backend, regular expressions of the kernels with which it computes attention, where they are known.
    """

    title: str
    references: Mapping[Device, str]
    kernels: Mapping[str, tuple[str, ...]]


def profile_of(engine: Engine) -> EngineProfile:
    """Return an engine's profile. Its package is found by its name, and imported here alone: nothing else below it names one."""
    profile: EngineProfile = import_module(f"assay.harness.engines.{engine}.profile").PROFILE
    return profile


class Settings(BaseModel):
    """Settings that a user gives: unknown names, infinities, and true or false in place of a number are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        """Refuse true and false, which pydantic would accept as 1 and 0."""
        if isinstance(value, bool):
            raise ValueError("a value, not true or false")
        return value


class Side(Settings):
    """The server of one role. Nothing in it depends on the other role."""

    engine: Engine = Field("sglang", description="engine that assay starts; ignored where the backend is a URL")
    backend: str = Field(
        min_length=1, description="attention backend, a kernel as module:function, or the URL of a running server"
    )
    model: str = Field(
        BUILTIN_MODEL,
        min_length=1,
        description="model folder or hub name; tiny is the model that ships with assay, and tiny-gemma2, tiny-gemma3, "
        "tiny-gpt-oss, tiny-qwen3 and tiny-deepseek-v2 are the same in layers of these families, and tiny-fp8-kv has scales for an "
        "FP8 KV cache",
    )
    interpreter: str = Field("", description="Python that starts the engine; by default the one that runs assay")
    flags: tuple[str, ...] = Field((), description="further flags of the engine, for example --page-size=16")
    environment: dict[str, str] = Field({}, description="further environment variables of the engine's process")

    def launched_with(self, environment: Mapping[str, str], flags: tuple[str, ...] = ()) -> Side:
        """Return the side with further environment variables, and further flags, which its own override."""
        return self.model_copy(
            update={"environment": {**self.environment, **environment}, "flags": (*flags, *self.flags)}
        )


def treatment(reference: Side, candidate: Side) -> dict[str, tuple[str, str]]:
    """Return what differs between two sides, as asked: (reference, candidate) by name of the setting.

    Flags are compared by flag and environment variables by name: "--page-size" and "environment.NAME". A setting that one side
    lacks is the empty string there.
    """
    left, right = settings(reference), settings(candidate)
    return {
        name: (left.get(name, ""), right.get(name, ""))
        for name in sorted(left.keys() | right.keys())
        if left.get(name, "") != right.get(name, "")
    }


def differing(differences: Mapping[str, tuple[str, str]]) -> str:
    """Describe what a candidate differs in: its backend, or else its settings, such as "--page-size=16"; empty for nothing."""
    if "backend" in differences:
        return differences["backend"][1]
    return " ".join(f"{name}={value}" for name, (_, value) in differences.items())


def flag_values(flags: tuple[str, ...]) -> dict[str, str]:
    """Return the value of each flag, by its name with dashes; a flag without a value is "true"."""
    values: dict[str, str] = {}
    last = ""
    for word in flags:
        if word.startswith("-"):
            last, _, value = word.partition("=")
            values[last] = value or "true"
        elif last:
            values[last] = word if values[last] == "true" else f"{values[last]} {word}"
    return values


def settings(side: Side) -> Mapping[str, str]:
    """Return the settings of a side by name, flags and environment variables one by one."""
    named = {name: getattr(side, name) for name in ("engine", "interpreter", "backend", "model")}
    return named | flag_values(side.flags) | {f"environment.{name}": value for name, value in side.environment.items()}
