"""A side of a run: the server in one role. The treatment is the requested difference between the two sides."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

BUILTIN_MODEL = "tiny"
Device = Literal["cpu", "cuda"]
Engine = Literal["sglang", "vllm", "hf"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
"""The registry of the engines that assay starts. Each is a package of `assay.harness.engines`, with a module ``profile``."""
Role = Literal["reference", "candidate"]
ROLES: tuple[Role, Role] = ("reference", "candidate")


@dataclass(frozen=True)
class MemoryProfile:
    """The memory that a server of an engine takes, to decide whether it fits.

    Attributes:
        server_bytes: bytes of a CPU server's processes, KV cache and activations, without the model.
        model_copies: bytes of the loaded weights on a CPU, and of what loading takes besides, in bytes of the files.
        share_flag: the flag that sets the share of a GPU's memory that a server takes for weights and KV cache.
        share: that share as assay sets it, so that two servers fit.
    """

    server_bytes: int
    model_copies: float
    share_flag: str
    share: float


@dataclass(frozen=True)
class EngineProfile:
    """The facts about an engine that are known without starting it.

    Attributes:
        title: its name.
        distributions: names under which the engine is distributed, the first the usual one.
        oldest: the oldest version that assay is tested with.
        references: by device, the attention backend that is the reference by default.
        backends: its own attention backends, or nothing if its installed source lists them (``catalog``).
        cpu_backends: those that it serves on a CPU.
        limits: flags that limit the tokens of a request.
        own_flags: flags that assay sets itself: a user's would break the comparison, or the proof that the right server answers.
        example_flag: a flag with a value, as messages show it.
        memory: what a server takes.
        kernels: regular expressions of the kernels that compute attention, by attention backend, if they are known.
        settings: by flag, a template of its value that describes the setting to a person.
        noise: by flag and value, the noise family that the flag declares, as a kernel declares its own.
        install: how to install it.
        merging: backends that compute prefill separately on cached and on new keys, and merge both in the model's dtype.
        exact_weights: backends that keep queries and softmax weights in the model's dtype if the KV cache has 8 bits.
        causes: causes of failures that only its logs name; `assay.harness.engines.failures` has all others: id, regular
            expression, and the remedy with its groups.
        instrumented: whether assay counts, shadows and traces its attention calls. An engine without that is a witness: it computes
            whole models, in a dtype of its own.
    """

    title: str
    distributions: tuple[str, ...]
    oldest: str
    references: Mapping[Device, str]
    cpu_backends: tuple[str, ...]
    limits: tuple[str, ...]
    own_flags: tuple[str, ...]
    example_flag: str
    memory: MemoryProfile
    kernels: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, str]
    noise: Mapping[tuple[str, str], str]
    install: str
    backends: tuple[str, ...] = ()
    merging: tuple[str, ...] = ()
    exact_weights: tuple[str, ...] = ()
    causes: tuple[tuple[str, str, str], ...] = ()
    instrumented: bool = True


def profile_of(engine: Engine) -> EngineProfile:
    """Return an engine's profile. Its package is imported by name, and only here: nothing else below it names an engine."""
    profile: EngineProfile = import_module(f"assay.harness.engines.{engine}.profile").PROFILE
    return profile


HIDDEN = "***"
"""The text that replaces a secret."""
# The text that replaces a candidate's secret if the reference's differs.
_ANOTHER = f"{HIDDEN} (another)"
# Words in the name of a secret: those that no other word contains, those often joined to a preceding word, and whole ones.
_SECRET_NAME = re.compile(
    r"passw(?:or)?d|passphrase|secret|credential|authorization|watermark_config"
    r"|(?:access|account|api|auth|encryption|master|private|service|shared|signing|ssh|storage|watermark)[-_.]?keys?(?![a-z])"
    r"|(?:access|api|auth|bearer|github|gitlab|hf|id|refresh|session)token$|(?<!per.)(?<!first.)(?<![a-z])token$"
    # A key is a secret only as the last word: models have settings such as num_key_value_heads.
    r"|(?<![a-z])keys?$|(?<![a-z])(?:pwd|pat|sas|sig|signature|auth|cookies?|headers)(?![a-z])",
    re.IGNORECASE,
)
_HANDS_ON = re.compile(r"-[\w-]*-arg(?:=|$)")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_URL_USER = re.compile(r'(?<=://)[^/\s"]+(?=@)')
# A setting inside a value: of a query, of a connection string, of JSON, of headers, of a command line; and its value.
_INNER_NAME = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*|(?<!\S)(?=-)([\w-]+)\s+(?!-)""")
_INNER_VALUE = re.compile(r"""(["'])(?P<quoted>.*?)\1|(?:(?:Basic|Bearer) )?[^\s&;,"'}]+""", re.IGNORECASE)
_NO_SECRETS = ("", "null", "true", "false")


class Settings(BaseModel):
    """Settings that a user gives: unknown names, infinities, and true or false instead of a number are refused."""

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
    packages: tuple[str, ...] = Field(
        (), description="packages laid over the interpreter's own, as pip requirements or paths of wheels"
    )
    flags: tuple[str, ...] = Field((), description="further flags of the engine, for example --page-size=16")
    environment: dict[str, str] = Field({}, description="further environment variables of the engine's process")

    @field_validator("environment", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """Read variables as a command line gives them: ("NAME=VALUE", ...)."""
        if isinstance(value, Mapping):
            return value
        pairs = [str(pair).partition("=") for pair in value]
        if wrong := [name for name, equals, _ in pairs if not name or not equals]:
            raise ValueError(f"NAME=VALUE, not {wrong[0]!r}")
        return {name: variable for name, _, variable in pairs}

    def launched_with(self, environment: Mapping[str, str], flags: tuple[str, ...] = ()) -> Side:
        """Return the side with further environment variables and flags, which its own override."""
        return self.model_copy(
            update={"environment": {**self.environment, **environment}, "flags": (*flags, *self.flags)}
        )


def treatment(reference: Side, candidate: Side) -> dict[str, tuple[str, str]]:
    """Return the requested differences between two sides: (reference, candidate) by name of the setting.

    Flags are compared by flag and environment variables by name: "--page-size" and "environment.NAME". A setting that one side
    lacks is the empty string there.
    """
    left, right = settings(reference), settings(candidate)
    return {
        name: (left.get(name, ""), right.get(name, ""))
        for name in sorted(left.keys() | right.keys())
        if left.get(name, "") != right.get(name, "")
    }


def declared_noise(side: Side, differences: Mapping[str, tuple[str, str]]) -> str:
    """Return the noise family that a flag of a side declares, or an empty string.

    Args:
        differences: the settings in which both sides differ: a flag that both have declares nothing.
    """
    given = flag_values(side.flags)
    known = profile_of(side.engine).noise.items()
    return next((noise for (flag, value), noise in known if flag in differences and given.get(flag) == value), "")


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
    named |= {"packages": ", ".join(side.packages)} if side.packages else {}
    return named | flag_values(side.flags) | {f"environment.{name}": value for name, value in side.environment.items()}


def is_secret(name: str) -> bool:
    """Return True if a setting of this name, a flag, an argument or a variable, holds a password, a key or a token."""
    return bool(_SECRET_NAME.search(_CAMEL.sub("_", name)))


def hide(name: str, value: str, another: bool = False) -> str:
    """Return the value of a setting without secrets: those of its name, and those inside it, such as in a URL or in JSON.

    Args:
        name: name of the flag, the argument or the variable.
        value: its value.
        another: whether the other side has another value.
    """
    if is_secret(name):
        return value if value in _NO_SECRETS else _ANOTHER if another else HIDDEN
    value = _URL_USER.sub(_ANOTHER if another else HIDDEN, value)
    for inner in reversed([*_INNER_NAME.finditer(value)]):
        held = _INNER_VALUE.match(value, inner.end())
        if held is None or not is_secret(inner[1] or inner[2]):
            continue
        part = "quoted" if held["quoted"] is not None else 0
        if held[part] not in _NO_SECRETS:
            value = value[: held.start(part)] + HIDDEN + value[held.end(part) :]
    return value


def hide_flags(words: Sequence[str], another: Collection[str] = ()) -> tuple[str, ...]:
    """Return the words of a command line without secrets; `another` as in `hide`, by flag.

    Flags such as ``--engine-arg`` pass on a word of another command line, as their value or as the next word.
    """
    hidden, flag = [], ""
    for word in words:
        lead = handing[0] if (handing := _HANDS_ON.match(word)) else ""
        value, name = word.removeprefix(lead), ""
        if value.startswith("-"):
            flag, equals, value = value.partition("=")
            name = flag + equals
        hidden.append(f"{lead}{name}{hide(flag, value, flag in another)}" if value else lead + name)
    return tuple(hidden)


def without_secrets(side: Side, beside: Side | None = None) -> Side:
    """Return a side to be written and shown: its secrets are hidden, with a different mark if they differ from `beside`'s."""
    ours, theirs = settings(side), settings(beside or side)
    another = {name for name, value in ours.items() if theirs.get(name, value) != value}
    environment = {
        name: hide(name, value, f"environment.{name}" in another) for name, value in side.environment.items()
    }
    backend = hide("backend", side.backend, "backend" in another)
    packages = tuple(hide("packages", package, "packages" in another) for package in side.packages)
    return side.model_copy(
        update={
            "backend": backend,
            "packages": packages,
            "flags": hide_flags(side.flags, another),
            "environment": environment,
        }
    )
