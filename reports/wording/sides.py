"""Sentences about a treatment: the differences between two sides, as a person would say them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from assay.harness.sides import ENGINES, profile_of
from assay.harness.text import counted, one_line

_LONGEST = 60
_VALUES = {
    "fp8_e4m3": "FP8", "fp8_e5m2": "FP8 (e5m2)", "fp8": "FP8", "bf16": "bfloat16", "half": "float16", "float": "float32",
}  # fmt: skip


def sides_said(
    treatment: Mapping[str, tuple[str, str]], reference: str, candidate: str, engines: tuple[str, str] = ("", "")
) -> tuple[str, str]:
    """Name the candidate and its reference: ("FP8 KV cache", "the same triton server without it").

    Args:
        treatment: the differences between the sides, from `assay.harness.sides.treatment`.
        reference: the reference's backend.
        candidate: the candidate's backend.
        engines: labels of the reference's and the candidate's engine, such as "SGLang 0.5.23 on cpu", or empty if unknown.
    """
    versions = [engine.partition(" on ")[0] for engine in engines]
    by_version = all(versions) and versions[0] != versions[1]  # says more than the path of an interpreter
    hidden = {"backend", *(("engine", "interpreter") if by_version else ())}
    settings = {name: pair for name, pair in treatment.items() if name not in hidden}
    # Another engine has no such flags, so they are no difference that anyone asked for.
    own = [name for name in settings if "engine" in treatment and name.startswith("--") and not _template(name)]
    theirs, ours = (
        [
            *versions[of : of + by_version],
            *(
                said
                for name, pair in settings.items()
                if name not in own and (said := _setting(name, pair[of], by_version))
            ),
            *(
                [f"{counted(count, 'flag')} of its own"]
                if (count := sum(bool(settings[name][of]) for name in own))
                else []
            ),
        ]
        for of in (0, 1)
    )
    if "backend" in treatment or not (ours or theirs):
        return _with(candidate, ours), _with(reference, theirs)
    if ours and theirs:
        return ", ".join(ours), ", ".join(theirs)
    same, them = f"the same {one_line(reference, _LONGEST)} server", "it" if len(ours or theirs) == 1 else "them"
    if ours:
        return ", ".join(ours), f"{same} without {them}"
    return f"{same} without {', '.join(theirs)}", f"{same} with {them}"


def _package(asked: str) -> tuple[str, str]:
    """Return the name of a package laid over an interpreter's own, and the package in a few words: "transformers 5.3.0"."""
    if asked.endswith(".whl"):
        name, version, *_ = PurePath(asked).name.split("-")
        return name.lower(), f"{name} {version}"
    name = re.match(r"[\w.-]*", asked)[0]  # type: ignore[index]
    return name.lower(), one_line(re.sub(r"\s*==\s*", " ", asked), _LONGEST)


def _with(backend: str, settings: list[str]) -> str:
    name = one_line(backend, _LONGEST)
    return f"{name} with {', '.join(settings)}" if settings else name


def _template(name: str) -> str:
    """Return the words for a flag that some engine's profile has, or an empty string."""
    return next((known[name] for engine in ENGINES if name in (known := profile_of(engine).settings)), "")


def _setting(name: str, value: str, by_version: bool) -> str:
    """Name a setting that a side has: "FP8 KV cache", "--page-size=16", "HF_HOME=/data", "Llama-3.1-8B-Instruct"; else ""."""
    if not value:
        return ""
    if template := _template(name):
        return template.format(_VALUES.get(value, value))
    if name == "model":
        return one_line(PurePath(value).name or value, _LONGEST)
    if name == "interpreter":
        return f"Python at {one_line(value, _LONGEST)}"
    if name == "packages":
        packages = [_package(package) for package in value.split(", ")]
        return ", ".join(said for package, said in packages if not (by_version and package in ENGINES))
    name = name.removeprefix("environment.")
    return one_line(name if value == "true" else f"{name}={value}", _LONGEST)
