"""``assay.toml`` and flags -> `RunSpec`, validated once.

A key in ``assay.toml`` has the name of its flag. ``[run]`` says what is run, ``[policy]`` the bounds that apply. Flags override the
file, the file overrides the profile. The spec records where each line of policy came from, so that every number of a verdict can
name the line that decided it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from assay.evals.loads import DEFAULT as DEFAULT_SHAPES
from assay.evals.questions import BUILTIN_DATA
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.reading import whole_file
from assay.harness.text import did_you_mean

BUILTIN_MODEL = "tiny"
FILE = "assay.toml"
RUNS = Path("runs")
"""Folder of the runs and bisections whose folder is not named."""
WIDEST_MARGIN = 0.10
"""Largest margin of accuracy that a policy may set."""
WIDEST_GREEDY_MARGIN = 0.25
"""Largest share of greedy texts apart that a policy may allow."""
WIDEST_LOGITS_LIMIT = 0.25
"""Largest mean KL that a policy may allow, in nats: twice what K and V in FP4 explain, the coarsest noise family."""
ENVELOPE_TOKENS = {"cpu": 256, "cuda": 2048}
"""New tokens, cached prefix and total length up to which a pass must have compared calls, by device. On the CPU it is what a run
of a few minutes allows, with every count of blocks up to there: interpreted SageAttention takes 0.5 s for a call of 512 tokens."""

Device = Literal["cpu", "cuda"]
SuiteName = Literal["mmlu", "greedy", "logits", "layers", "latency"]
Placement = Literal["auto", "together", "in-turn"]

# Defaults of a device.
PROFILES: dict[str, dict[str, Any]] = {
    "cpu": {"reference": "torch_native", "candidate": "sage_attn", "logits_prompts": 64},
    "cuda": {"reference": "triton", "candidate": "sage_attn", "logits_prompts": 256},
}


class RunSpec(BaseModel):
    """Everything that decides what a run does. It is written into the run's manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    device: Device = Field("cpu", description="device of both servers: cpu (no GPU needed) or cuda")
    reference: str = Field(
        min_length=1, description="attention backend of the reference, or the URL of an OpenAI-compatible server"
    )
    candidate: str = Field(
        min_length=1, description="attention backend of the candidate, a kernel as module:function, or a URL"
    )
    model: str = Field(
        BUILTIN_MODEL,
        min_length=1,
        description="model folder or hub name; tiny is the model that ships with assay",
    )
    data: str = Field(
        BUILTIN_DATA,
        min_length=1,
        description="questions: builtin; a CSV or parquet file with simple-evals columns, or a hub dataset; gsm8k, or gsm8k:FILE; "
        "retrieval, or retrieval:LENGTHS in tokens, separated by commas; lm-eval:TASK",
    )
    questions: int = Field(
        4096, ge=1, description="most multiple-choice questions asked; fewer are, as soon as the answers decide"
    )
    order_seed: int = Field(0, ge=0, description="seed of the random order of the questions")
    margin: float = Field(
        0.02, gt=0, description="largest loss of accuracy that still passes, as a fraction; at most 0.1"
    )
    alpha: float = Field(0.05, gt=0, le=0.2, description="error rate of each interval and test")
    greedy_prompts: int = Field(
        128, description="number of prompts in the greedy comparison; fewer than 128 cannot pass"
    )
    greedy_margin: float = Field(
        0.10, gt=0, description="largest share of greedy texts that may differ by more than noise; at most 0.25"
    )
    logits_prompts: int = Field(
        64, description="number of prompts whose logits are compared; fewer than 64 give no verdict"
    )
    logits_limit: float | None = Field(
        None,
        gt=0,
        description="largest mean KL of the logits, in nats, at most 0.25; by default what the declared noise explains",
    )
    concurrency: int = Field(32, ge=1, le=1024, description="requests in flight")
    max_tokens: int | None = Field(
        None, ge=1, description="token limit of an answer; by default 32 for the built-in questions, else 2048"
    )
    engine_arg: tuple[str, ...] = Field(
        (), description="extra flag for both servers, for example --page-size=16; may be repeated"
    )
    suites: tuple[SuiteName, ...] = Field(
        ("mmlu", "greedy", "logits", "layers"),
        min_length=1,
        description="suites to run, separated by commas: mmlu, greedy, logits, layers, latency",
    )
    latency_shapes: tuple[str, ...] = Field(
        DEFAULT_SHAPES,
        min_length=1,
        description="shapes of the requests to time: short, long, shared, chunked, offline, or tokens as PROMPT:OUTPUT[:SHARED]",
    )
    latency_concurrency: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        (1, 4),
        min_length=1,
        description="requests in flight while timing, separated by commas; each is a load of its own",
    )
    latency_seconds: float = Field(
        120.0, gt=0, description="seconds of timing, warm-up included; more if the 6 rounds after warm-up take longer"
    )
    latency_bound: float = Field(
        1.10, ge=1, description="largest ratio of times, candidate over reference, that still passes"
    )
    budget_mb: int = Field(256, ge=1, description="largest size of the recorded replay pack, in MiB")
    require: tuple[SuiteName, ...] = Field((), description="suites without which there is no pass, separated by commas")
    bounds: dict[str, float] = Field(
        {},
        description="largest own error (relative L1), by the noise that a kernel declares; exact for kernels that declare none",
    )
    envelope_tokens: int | None = Field(
        None,
        ge=128,
        le=1_000_000,
        description="length in tokens up to which a pass must have compared calls; by default 256 on the CPU, 2048 on a GPU",
    )
    baselines: str = Field("baselines", min_length=1, description="folder of the accepted baselines")
    certificate: str = Field(
        "",
        description="certificate of the harness that the report cites; by default certificate.json among the baselines",
    )
    growth: float = Field(
        1.5, ge=1, description="largest growth of an own error over the accepted baseline's, as a factor"
    )
    reference_from: Literal["server", "baseline"] = Field(
        "server", description="where the reference's answers come from: a server, or the matching accepted baseline"
    )
    servers: Placement = Field(
        "auto", description="run both servers together, in-turn, or auto: together if memory holds both"
    )
    startup_timeout: float = Field(900.0, gt=0, description="seconds until a server must be ready")
    request_timeout: float = Field(300.0, gt=0, description="seconds until an answer must be complete")
    policy_from: dict[str, str] = Field({}, description="where each given line of policy came from")

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        """Refuse true and false, which would be taken for 1 and 0."""
        if isinstance(value, bool):
            raise ValueError("a value, not true or false")
        return value

    @field_validator("suites", "require", "latency_shapes", "latency_concurrency", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Split "mmlu,greedy" at its commas, and drop repeated names."""
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",") if word.strip()]
        return tuple(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else value

    @field_validator("greedy_prompts", "logits_prompts")
    @classmethod
    def _asks_something(cls, prompts: int, info: ValidationInfo) -> int:
        if prompts < 1:
            suite = str(info.field_name).removesuffix("_prompts")
            raise ValueError(f"at least 1; to leave the suite out, name the others with --suites, without {suite}")
        return prompts

    @field_validator("bounds")
    @classmethod
    def _positive(cls, bounds: dict[str, float]) -> dict[str, float]:
        if any(bound <= 0 for bound in bounds.values()):
            raise ValueError("bounds above 0")
        return bounds

    @field_validator("margin")
    @classmethod
    def _narrow(cls, margin: float) -> float:
        if margin > WIDEST_MARGIN:
            raise ValueError(
                f"at most {WIDEST_MARGIN:g}: a wider margin would pass a candidate that loses more than one answer in ten"
            )
        return margin

    @field_validator("greedy_margin", "logits_limit")
    @classmethod
    def _decides_something(cls, limit: float | None, info: ValidationInfo) -> float | None:
        widest = WIDEST_GREEDY_MARGIN if info.field_name == "greedy_margin" else WIDEST_LOGITS_LIMIT
        if limit is not None and limit > widest:
            raise ValueError(f"at most {widest:g}: a wider one would pass a candidate that says something else")
        return limit

    @property
    def regression_alpha(self) -> float:
        """Level of each suite's test of a regression: alpha, shared among the suites and the comparison with a baseline."""
        return self.alpha / (len(self.suites) + 1)

    def policy_line(self, name: str) -> str:
        """A line of policy and its source: "margin = 0.05 (default)". `name` may be a key of `bounds`."""
        if name in POLICY:
            value = self.envelope if name == "envelope_tokens" else getattr(self, name)
            return f"{name} = {value} ({self.policy_from.get(name, 'default')})"
        return f"bounds.{name} = {self.bounds[name]} ({self.policy_from.get('bounds', 'default')})"

    @property
    def weakened(self) -> tuple[str, ...]:
        """The lines of policy that pass more than their defaults do: a reader must not have to know these."""
        weaker = {
            name: getattr(self, name) > RunSpec.model_fields[name].default
            for name in ("margin", "alpha", "greedy_margin", "latency_bound", "growth")
        }
        weaker["logits_limit"] = self.logits_limit is not None
        weaker["require"] = "require" in self.policy_from and not self.require
        weaker["envelope_tokens"] = self.envelope < ENVELOPE_TOKENS[self.device]
        return tuple(self.policy_line(name) for name in POLICY if weaker.get(name))

    @property
    def synthetic(self) -> bool:
        """Whether the questions are the built-in synthetic ones."""
        return self.data == BUILTIN_DATA

    @property
    def envelope(self) -> int:
        """The policy's envelope: length in tokens up to which a pass must have compared calls."""
        return self.envelope_tokens or ENVELOPE_TOKENS[self.device]

    @property
    def token_limit(self) -> int:
        """Token limit of a multiple-choice answer; simple-evals and SGLang use 2048 for real MMLU."""
        return self.max_tokens or (32 if self.synthetic else 2048)


POLICY = (
    "margin",
    "alpha",
    "greedy_margin",
    "logits_limit",
    "latency_bound",
    "require",
    "bounds",
    "envelope_tokens",
    "baselines",
    "certificate",
    "growth",
    "reference_from",
)
"""Fields that are bounds of a verdict: the keys of ``[policy]``."""
FRACTIONS = ("margin", "greedy_margin", "alpha")
"""Fields that people also state in points or percent."""
FLAGS = tuple(name for name in RunSpec.model_fields if name not in ("bounds", "policy_from"))
"""Fields that are flags."""
GATE_FLAGS = ("baselines", "growth", "reference_from")
"""Flags that only a run compared with the accepted baselines has."""
RUN_FLAGS = tuple(name for name in FLAGS if name not in GATE_FLAGS)
SERVER_FLAGS = ("device", "reference", "candidate", "model", "engine_arg")
"""Flags of every command that starts servers."""
BENCH_FLAGS = (
    *SERVER_FLAGS, "latency_shapes", "latency_concurrency", "latency_seconds", "latency_bound", "alpha", "data", "max_tokens",
    "servers", "startup_timeout", "request_timeout",
)  # fmt: skip
"""Flags of ``assay bench``: everything that decides what it measures and how it is judged."""
BISECT_FLAGS = (*SERVER_FLAGS, "data", "alpha", "concurrency", "max_tokens", "startup_timeout", "request_timeout")
"""Flags of ``assay bisect layers`` besides its own."""


def make_spec(flags: Mapping[str, Any], file: Path | None = None) -> RunSpec:
    """Join profile, ``assay.toml`` and flags (None means not given) into a validated `RunSpec`.

    Args:
        flags: values by field name.
        file: the ``assay.toml`` to read; None reads the one in the working directory, if any.

    Raises:
        UsageError: an unreadable file, an unknown key, or a value out of range.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    written = read_file(file)
    merged = {**written, **given}
    profile = PROFILES.get(str(merged.get("device", "cpu")), {})
    sources = {name: f"{file or FILE}, [policy]" for name in POLICY if name in written}
    sources |= {name: flag(name) for name in POLICY if name in given}
    try:
        return RunSpec(**{**profile, **merged}, policy_from=sources)
    except ValidationError as error:
        raise _usage_error(error, file or Path(FILE), set(written) - set(given)) from None


def recorded_spec(recorded: Mapping[str, Any]) -> RunSpec:
    """The spec that a run's manifest holds.

    Raises:
        EvidenceError: it is not one that this version of assay would run.
    """
    try:
        return RunSpec(**recorded)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "spec"
        raise EvidenceError(
            f"The run's recorded spec has {where} = {first['input']!r}.",
            f"a spec that this version of assay can judge: {first['msg'].removeprefix('Value error, ')}",
            "restore manifest.json, judge the run with the version that made it, or run again",
        ) from None


def read_file(file: Path | None) -> dict[str, Any]:
    """The keys of ``[run]`` and ``[policy]`` of an ``assay.toml``, or an empty dict if there is none.

    Raises:
        UsageError: the named file is missing or not TOML, or it has an unknown section or key.
    """
    path = file or Path(FILE)
    if not path.exists():
        if file is None:
            return {}
        raise UsageError(f"{file} does not exist.", "the path of an assay.toml", "check the path given with --config")
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "the path of an assay.toml", "name the file in it with --config")
    try:
        document = tomllib.loads(whole_file(path).decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}.", "a TOML file", "correct it at the position named"
        ) from None
    sections = {"run": set(FLAGS) - set(POLICY), "policy": set(POLICY)}
    _refuse_unknown(document, set(sections), f"{path}, section")
    merged: dict[str, Any] = {}
    for section, keys in sections.items():
        table = document.get(section, {})
        if not isinstance(table, dict):
            raise UsageError(
                f"{path}: {section} is {table!r}.",
                f"a table headed [{section}]",
                f"put the keys under a line [{section}]",
            )
        other = next(name for name in sections if name != section)
        if moved := sorted(set(table) & sections[other]):
            raise UsageError(
                f"{path}, [{section}]: the key {moved[0]!r} belongs to [{other}].",
                f"{moved[0]} under [{other}]",
                "move it there: [run] says what is run, [policy] the bounds that apply",
            )
        _refuse_unknown(table, keys, f"{path}, [{section}], key")
        merged |= table
    return merged


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise UsageError(f"{where} {key!r} is unknown.", f"one of {', '.join(sorted(known))}", hint)


def _usage_error(error: ValidationError, file: Path, of_file: Collection[str]) -> UsageError:
    """The usage error of a field that is not valid.

    Args:
        error: the field's.
        file: the ``assay.toml``.
        of_file: fields that the file sets.
    """
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "spec"
    field = RunSpec.model_fields.get(name)
    about = f" ({field.description})" if field and field.description else ""
    given = flag(name)
    message, value = expectation(first["msg"]), first["input"]
    where = given
    if name in of_file:
        given, where = name, f"{file}, [{'policy' if name in POLICY else 'run'}]: {name}"
    choices = _choices(name)
    if value in ((), []):
        return UsageError(
            f"{where} is empty.", f"{listed_or(choices) or message}{about}", f"name one, or leave {given} out"
        )
    do = points_meant(given, value) if name in FRACTIONS else did_you_mean(str(value), choices)
    return UsageError(
        f"{where} is {value!r}.", f"{message}{about}", do or f"give {given} another value, or leave it out"
    )


def _choices(name: str) -> tuple[str, ...]:
    """The words that a field may be, or may list; none if it is no choice of words."""
    annotation = RunSpec.model_fields[name].annotation if name in RunSpec.model_fields else None
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def listed_or(words: Collection[str]) -> str:
    """Words to choose from: "'cpu' or 'cuda'"."""
    quoted = [repr(word) for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


def expectation(message: str) -> str:
    """What was expected, of a message of pydantic or click: "greater than 0", "a whole number", "one of 'skip', 'bad'"."""
    plain = (
        message.removeprefix("Value error, ").removeprefix("Input should be ").replace("Input ", "it ", 1).rstrip(".")
    )
    for begins, said in (("a valid integer", "a whole number"), ("a valid number", "a number")):
        if plain.startswith(begins):
            return said
    _, listed, choices = plain.partition(" is not one of ")
    return f"one of {choices}" if listed else plain


def points_meant(given: str, value: object) -> str:
    """What to do about points where a fraction is wanted: "5 points = 0.05: give --margin 0.05"; empty for any other value.

    Args:
        given: the flag, or the key of an ``assay.toml``.
        value: what it is set to.
    """
    if not isinstance(value, int | float) or not 1 <= value <= 100:
        return ""
    return f"{value:g} points = {value / 100:g}: give {given}{' ' if given.startswith('-') else ' = '}{value / 100:g}"


def flag(name: str) -> str:
    """How a field is spelled on a command line: ``--engine-arg`` for "engine_arg"."""
    return "--" + name.replace("_", "-")
