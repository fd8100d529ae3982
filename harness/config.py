"""``assay.toml`` and flags -> `RunSpec`, validated once: two sides, a workload and a policy.

A key in ``assay.toml`` has the name of its flag. ``[run]`` sets what to run, ``[policy]`` the bounds that apply. Flags override
the file, and the file overrides the profile of the device. The policy records the origin of each of its lines, so that every
number of a verdict can name the line that decided it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.policy import FRACTIONS, POLICY, Policy
from assay.harness.reading import read_toml
from assay.harness.sides import (
    ENGINES,
    ROLES,
    Device,
    Engine,
    Role,
    Settings,
    Side,
    hide,
    hide_flags,
    profile_of,
    treatment,
    without_secrets,
)
from assay.harness.text import did_you_mean
from assay.harness.workload import Workload

FILE = "assay.toml"
RUNS = Path("runs")
"""Folder of the runs and bisections without a named folder."""

_Placement = Literal["auto", "together", "in-turn"]

_CANDIDATE = "sage_attn"
_ENGINE: Engine = Side.model_fields["engine"].default
# Defaults of a device, by flag. `envelope_tokens`: on the CPU, as many as a run of a few minutes allows, with every count of
# blocks up to there, since interpreted SageAttention takes 0.5 s for a call of 512 tokens.
_LOADS: dict[Device, dict[str, int]] = {
    "cpu": {"logits_prompts": 64, "envelope_tokens": 256},
    "cuda": {"logits_prompts": 256, "envelope_tokens": 2048},
}


# Flags of both sides, with the field of `Side` that each sets; the flags of one side by field; and these with their field.
_SHARED = {"engine": "engine", "model": "model", "engine_arg": "flags"}
_SIDE_KEYS = {
    "backend": "{}",
    "engine": "{}_engine",
    "model": "{}_model",
    "flags": "{}_arg",
    "environment": "{}_env",
    "interpreter": "{}_python",
    "packages": "{}_with",
}
# The keys of the tables of both sides: the fields, where one has the name of its flag.
_TABLE_KEYS = {"with" if part == "packages" else part: name for part, name in _SIDE_KEYS.items()}
_OF_SIDE: dict[Role, dict[str, str]] = {
    role: {name.format(role): part for part, name in _SIDE_KEYS.items() if part != "backend"} for role in ROLES
}


def defaults(device: Device, engine: Engine = _ENGINE) -> dict[str, Any]:
    """Return the defaults of a device, by flag: its loads, and the engine's reference backend there."""
    return {"reference": profile_of(engine).references[device], "candidate": _CANDIDATE, **_LOADS[device]}


class RunSpec(Settings):
    """Everything that decides what a run does: two sides, their questions, the limits, and where they run.

    It is written into the run's manifest.
    """

    device: Device = Field("cpu", description="device of both servers: cpu (no GPU needed) or cuda")
    reference: Side
    candidate: Side
    reference_baseline: str = Field(
        "", description="folder of the accepted baseline that stands in for the reference's server"
    )
    workload: Workload = Workload()
    policy: Policy = Policy()
    servers: _Placement = Field(
        "auto", description="run both servers together, in-turn, or auto: together if memory holds both"
    )
    startup_timeout: float = Field(900.0, gt=0, description="seconds until a server must be ready")
    request_timeout: float = Field(300.0, gt=0, description="seconds until an answer must be complete")

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Sort settings that are named like their flags into the parts of a run::

            RunSpec.of(reference="torch_native", candidate="mine:forward", questions=512)

        `model` and `engine_arg` apply to both sides; `candidate_model`, `candidate_arg`, `candidate_env`, `candidate_python`,
        `candidate_with`, and the same for the reference, apply to one side. Missing settings get the default of their device. A
        candidate with its own settings has the reference's backend, unless another one is named::

            RunSpec.of(reference="triton", candidate_arg=("--kv-cache-dtype=fp8_e4m3",))

        Raises:
            UsageError: a name is unknown, or a value out of range.
        """
        _refuse_unknown(given, set(FIELDS), "RunSpec.of: the setting")
        try:
            return cls._sorted(given)
        except ValidationError as error:
            raise _usage_error(error, Path(FILE), (), given) from None

    @classmethod
    def _sorted(cls, given: dict[str, Any]) -> Self:
        """Sort settings, and the origin of each line of the policy, into the parts of a run."""
        device = given.get("device", "cpu")
        for role in ROLES:  # an engine's name alone means its usual backend
            if given.get(role) in ENGINES:
                given = {**given, f"{role}_engine": given[role]}
                del given[role]
        engines = {role: given.get(f"{role}_engine", given.get("engine", _ENGINE)) for role in ROLES}
        engines = {role: engine if engine in ENGINES else _ENGINE for role, engine in engines.items()}  # refused below
        known = device in get_args(Device)
        usual = defaults(device, engines["reference"]) if known else {}
        if known and engines["candidate"] != engines["reference"]:
            usual["candidate"] = profile_of(engines["candidate"]).references[device]
        elif "candidate" not in given and _OF_SIDE["candidate"].keys() & given.keys():
            usual["candidate"] = given.get("reference", usual.get("reference"))
        given = {**usual, **given}
        shared = {part: given.pop(name) for name, part in _SHARED.items() if name in given}
        for role in ROLES:
            own = {part: given.pop(name) for name, part in _OF_SIDE[role].items() if name in given}
            if isinstance(given.get(role), Side):
                given[role] = {**given[role].model_dump(), **own}
            elif role in given:
                both = shared if profile_of(engines[role]).instrumented else {**shared, "flags": ()}
                if "flags" in own and "flags" in both:
                    own["flags"] = (*both["flags"], *own["flags"])
                given[role] = {"backend": given[role], **both, **own}
        for name, part in (("workload", Workload), ("policy", Policy)):
            given[name] = {field: given.pop(field) for field in part.model_fields if field in given}
        return cls(**given)

    @property
    def treatment(self) -> dict[str, tuple[str, str]]:
        """The settings in which the sides differ, as requested: (reference, candidate) by name of the setting."""
        return treatment(self.reference, self.candidate)

    @property
    def sides(self) -> dict[Role, Side]:
        """The side that serves in each role."""
        return {"reference": self.reference, "candidate": self.candidate}

    def changed(self, **settings: Any) -> Self:
        """Return a copy with other settings of the workload, the policy or the run, by the names of their flags."""
        parts: dict[str, Any] = {}
        for name, part in (("workload", self.workload), ("policy", self.policy)):
            mine = {field: settings.pop(field) for field in type(part).model_fields if field in settings}
            parts[name] = part.model_copy(update=mine)
        return self.model_copy(update=parts | settings)

    def recorded(self) -> Self:
        """Return the spec as recorded in a manifest: without the secrets of its sides."""
        candidate = without_secrets(self.candidate, beside=self.reference)
        return self.model_copy(update={"reference": without_secrets(self.reference), "candidate": candidate})

    def given_flags(self, names: Iterable[str]) -> list[str]:
        """List the flags among `names` that repeat a run, without secrets: both roles, and every value that is not a default."""
        flags = []
        for name in names:
            value = self._setting(name)
            if value is None or (name not in ROLES and value == defaults(self.device).get(name, FIELDS[name].default)):
                continue
            if isinstance(value, tuple) and name not in REPEATED:
                value = ",".join(map(str, value))
            flags += [f"{flag(name)}={each}" for each in (value if isinstance(value, tuple) else (value,))]
        return flags

    def _setting(self, name: str) -> Any:
        """Return a setting by the name of its flag; `model` and `engine_arg` are the reference's."""
        if name == "reference" and self.reference_baseline:
            return self.reference_baseline
        if name in ROLES:
            return hide(name, getattr(self, name).backend)
        shared = {part for part in _SHARED.values() if getattr(self.reference, part) == getattr(self.candidate, part)}
        for side, parts in ((self.reference, _SHARED), *((self.sides[role], _OF_SIDE[role]) for role in ROLES)):
            if part := parts.get(name):
                return _as_given(getattr(side, part)) if (part in shared) == (parts is _SHARED) else None
        return getattr(
            next(part for part in (self, self.workload, self.policy) if name in type(part).model_fields), name
        )

    @property
    def regression_alpha(self) -> float:
        """Level of each suite's test of a regression: alpha, shared among the suites and the op-level matrix."""
        return self.policy.alpha / (len(self.workload.suites) + 1)

    @property
    def weakened(self) -> tuple[str, ...]:
        """The lines of policy that are more lenient than their defaults."""
        return self.policy.weakened(defaults(self.device))


def _as_given(value: Any) -> Any:
    """Return a setting of a side in the form of its flag, without secrets."""
    if isinstance(value, Mapping):
        return tuple(f"{name}={hide(name, variable)}" for name, variable in value.items())
    return hide_flags(value) if isinstance(value, tuple) else value


def _described(name: str, description: str) -> FieldInfo:
    """Return the field of a side with the description of its flag."""
    return FieldInfo.merge_field_infos(Side.model_fields[name], description=description)


FIELDS: dict[str, FieldInfo] = {
    "device": RunSpec.model_fields["device"],
    "reference": _described(
        "backend",
        "attention backend of the reference, hf for transformers in float32, a URL of an OpenAI-compatible server, or an accepted "
        "baseline's folder",
    ),
    "candidate": _described("backend", "attention backend of the candidate, a kernel as module:function, or a URL"),
    "engine": _described("engine", "engine of both servers: sglang, vllm or hf (transformers)"),
    "model": Side.model_fields["model"],
    "engine_arg": _described("flags", "extra flag for both servers, for example --page-size=16; may be repeated"),
    **{
        f"{role}_{name}": _described(part, f"{about} of the {role} alone{more}")
        for role in ROLES
        for name, part, about, more in (
            ("engine", "engine", "engine", ""),
            ("model", "model", "model", ""),
            ("arg", "flags", "extra engine flag", ", for example --kv-cache-dtype=fp8_e4m3; may be repeated"),
            ("env", "environment", "environment variable", ", as NAME=VALUE; may be repeated"),
            ("python", "interpreter", "Python that starts the engine", ", as of another environment"),
            ("with", "packages", "package that the engine", " gets, for example transformers==5.3; may be repeated"),
        )
    },
    **Workload.model_fields,
    **{name: Policy.model_fields[name] for name in POLICY},
    **{name: RunSpec.model_fields[name] for name in ("servers", "startup_timeout", "request_timeout")},
}
"""The settings of a run, by the name of the flag that sets them."""
# Lines that a team agrees on once, not from run to run.
_FILE_ONLY = (
    "alpha", "bounds", "budget_mb", "concurrency", "envelope_tokens", "greedy_margin", "greedy_prompts", "length_bound",
    "logits_limit", "logits_prompts", "max_tokens", "order_seed", "request_timeout", "require",
)  # fmt: skip
FLAGS = tuple(name for name in FIELDS if name not in _FILE_ONLY)
"""Settings that are flags, too; the others can be set only in ``assay.toml``."""
# Flags that only a gate has.
_GATE_FLAGS = ("fingerprint",)
RUN_FLAGS = tuple(name for name in FLAGS if name not in _GATE_FLAGS)
REPEATED = ("engine_arg", *(f"{role}_{name}" for role in ROLES for name in ("arg", "env", "with")))
"""Flags that may be given several times."""
SERVER_FLAGS = ("device", "engine", *ROLES, "model", "engine_arg")
"""Flags of every command that starts servers."""
BENCH_FLAGS = (
    *SERVER_FLAGS, *(name for role in ROLES for name in _OF_SIDE[role]),
    "latency_shapes", "latency_concurrency", "latency_seconds", "latency_bound", "servers", "startup_timeout",
)  # fmt: skip
"""Flags of ``assay bench``: everything that decides what it measures and how it is judged."""
BISECT_FLAGS = (*SERVER_FLAGS, "data", "startup_timeout")
"""Flags of ``assay bisect layers``, in addition to its own."""
SIDES_FLAGS = (
    *SERVER_FLAGS, *(name for role in ROLES for name in _OF_SIDE[role]), "data", "questions", "margin", "startup_timeout",
)  # fmt: skip
"""Flags of ``assay bisect sides``."""


INVARIANCE_FLAGS = ("device", "engine", "reference", "model", "engine_arg", "startup_timeout")
"""Flags of ``assay invariance``, in addition to its own."""


def make_spec(flags: Mapping[str, Any], file: Path | None = None) -> RunSpec:
    """Join profile, ``assay.toml`` and flags (None means not given) into a validated `RunSpec`.

    Args:
        flags: values by the name of the flag.
        file: the ``assay.toml`` to read, or None for the one in the working directory, if any.

    Raises:
        UsageError: an unreadable file, an unknown key, or a value out of range.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    written = _read_file(file)
    sources = {name: f"{file or FILE}, [policy]" for name in POLICY if name in written}
    sources |= {name: flag(name) for name in POLICY if name in given}
    try:
        return RunSpec._sorted({**written, **given, "given_by": sources})
    except ValidationError as error:
        raise _usage_error(error, file or Path(FILE), written, given) from None


def is_candidate_named(flags: Mapping[str, Any], file: Path | None) -> bool:
    """Return True if a flag or the ``assay.toml`` names a candidate, and not only the default does."""
    return flags.get("candidate") is not None or "candidate" in _read_file(file)


def recorded_spec(recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec in a run's manifest.

    Raises:
        EvidenceError: this version of assay would not run such a spec.
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


def _read_file(file: Path | None) -> dict[str, Any]:
    """Read the keys of ``[run]`` and ``[policy]`` of an ``assay.toml``, or return an empty dict if none exists or was named."""
    path = file or Path(FILE)
    if not path.exists():
        if file is None:
            return {}
        raise UsageError(f"{file} does not exist.", "the path of an assay.toml", "check the path given with --config")
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "the path of an assay.toml", "name the file in it with --config")
    document = read_toml(path)
    of_sides: dict[str, set[str]] = {role: set(_TABLE_KEYS) for role in ROLES}
    sections = {"run": set(FIELDS) - set(POLICY), "policy": set(POLICY), **of_sides}
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
        for other in ("run", "policy"):
            if moved := sorted(set(table) & sections[other] - keys):
                raise UsageError(
                    f"{path}, [{section}]: the key {moved[0]!r} belongs to [{other}].",
                    f"{moved[0]} under [{other}]",
                    "move it there: [run] sets what is run, [policy] the bounds that apply, [reference] and [candidate] the sides",
                )
        _refuse_unknown(table, keys, f"{path}, [{section}], key")
        named = {_TABLE_KEYS[key].format(section): value for key, value in table.items()} if section in ROLES else table
        if twice := sorted(merged.keys() & named.keys()):
            raise UsageError(
                f"{path} sets {twice[0]} in [run] and in [{section}].", "one of them", "remove it from one of both"
            )
        merged |= named
    return merged


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known) or "remove it"
            raise UsageError(f"{where} {key!r} is unknown.", f"one of {', '.join(sorted(known))}", hint)


def _usage_error(error: ValidationError, file: Path, written: Collection[str], flags: Collection[str]) -> UsageError:
    """Make the usage error for an invalid field, set by the ``assay.toml`` or by a flag."""
    first = error.errors()[0]
    name = _setting_at(first["loc"], {*written, *flags})
    field = FIELDS.get(name)
    about = f" ({field.description})" if field and field.description else ""
    given = flag(name)
    message, value = expectation(first["msg"]), first["input"]
    where = given
    if name in written and name not in flags:
        given, where = name, f"{file}, [{'policy' if name in POLICY else 'run'}]: {name}"
    choices = _choices(name)
    if value in ((), []):
        return UsageError(
            f"{where} is empty.", f"{_listed_or(choices) or message}{about}", f"name one, or leave {given} out"
        )
    do = points_meant(given, value) if name in FRACTIONS else did_you_mean(str(value), choices)
    return UsageError(
        f"{where} is {value!r}.", f"{message}{about}", do or f"give {given} another value, or leave it out"
    )


def _setting_at(place: tuple[int | str, ...], given: Collection[str]) -> str:
    """Return the name of the flag that an error is about, from its place in a `RunSpec`; one of those `given`, if any."""
    part, inside = (*map(str, place), "", "")[:2]
    if part in ROLES:
        name = _SIDE_KEYS.get(inside, "{}").format(part)
        return next(
            (both for both, of in _SHARED.items() if of == inside and both in given and name not in given), name
        )
    return inside if part in ("workload", "policy") else part or "spec"


def _choices(name: str) -> tuple[str, ...]:
    """List the words that a field may be, or may list, or nothing for a field without a choice of words."""
    annotation = FIELDS[name].annotation if name in FIELDS else None
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _listed_or(words: Collection[str]) -> str:
    """List the words to choose from: "'cpu' or 'cuda'"."""
    quoted = [repr(word) for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


def expectation(message: str) -> str:
    """Extract the expectation from a message of pydantic or click: "greater than 0", "a whole number", "one of 'skip', 'bad'"."""
    plain = (
        message.removeprefix("Value error, ").removeprefix("Input should be ").replace("Input ", "it ", 1).rstrip(".")
    )
    for begins, said in (("a valid integer", "a whole number"), ("a valid number", "a number")):
        if plain.startswith(begins):
            return said
    _, listed, choices = plain.partition(" is not one of ")
    return f"one of {choices}" if listed else plain


def points_meant(given: str, value: object) -> str:
    """Advise on points given for a fraction ("5 points = 0.05: give --margin 0.05"), or return an empty string.

    Args:
        given: the flag, or the key of an ``assay.toml``.
        value: its value.
    """
    if not isinstance(value, int | float) or not 1 <= value <= 100:
        return ""
    return f"{value:g} points = {value / 100:g}: give {given}{' ' if given.startswith('-') else ' = '}{value / 100:g}"


def flag(name: str) -> str:
    """Spell a field as on a command line: ``--engine-arg`` for "engine_arg"."""
    return "--" + name.replace("_", "-")
