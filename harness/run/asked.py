"""Test of whether the backends of a run honour what the model's layers ask for, before servers start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from assay.harness.attention.call import FEATURES
from assay.harness.attention.forms import feature_of
from assay.harness.backend import Backend
from assay.harness.config import RunSpec
from assay.harness.engines.model import model_shape
from assay.harness.errors import UsageError
from assay.harness.evidence.honours import BackendResult
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.sides import ROLES, Role, Side

_DOES = {"ignores": "ignores", "refuses": "refuses", "crashes": "fails on", "wrong": "computes something else for"}
"""What a backend does that does not honour what is asked, by state."""


def check_asked(plan: Plan, display: ProgressDisplay) -> None:
    """Measure what the engine's own backends do with what the layers ask for; a model of plain attention costs nothing.

    What a backend that is the candidate does not honour is said, and so are a window that is off by a key, which is nearly what was
    asked for, and what could not be measured here.

    Raises:
        UsageError: the reference ignores what the layers ask for, or cannot compute it: it can be no reference. Or a kernel does
            not declare what they ask for: it would be refused their calls.
    """
    for role, fatal, text in unmet({role: plan.backend(role) for role in ROLES}, asked_of(plan.spec, plan.models)):
        if fatal and plan.backend(role).is_kernel:
            raise UsageError(
                f"The {role} {text}.",
                "a kernel that declares what the model's layers ask for, in @declares(features=...)",
                "declare it if the kernel computes it, or name another --model",
            )
        if fatal:
            raise UsageError(
                f"The reference {text}.",
                "a reference that computes what the model's layers ask for",
                "name another --reference; assay backends --honours shows what each backend does",
            )
        display.say(f"The {role} {text}.")


def asked_of(spec: RunSpec, models: Mapping[Role, Path]) -> dict[Role, Mapping[str, str]]:
    """Read what the layers of each side's model ask for, with its flags, as `assay.harness.engines.model.ModelShape.asks`."""
    return {role: model_shape(models[role], side.flags).asks for role, side in spec.sides.items()}


def ignored_of(model: Path, side: Side, measuring: bool = True) -> tuple[str, ...] | None:
    """List what the layers of a model ask for and a side's backend is not shown to compute, a sentence each.

    Args:
        model: the folder of the side's model.
        side: the backend and the flags.
        measuring: whether the engine's own backend may be measured, which takes memory of the device.

    Returns:
        None where it would have to be measured.

    Raises:
        UsageError: the model's configuration cannot be read.
    """
    asks, backend = model_shape(model, side.flags).asks, Backend.parse(side.backend)
    if asks and not measuring and not backend.is_kernel:
        return None
    return tuple(text for _, _, text in unmet({"candidate": backend}, {"candidate": asks}))


def unmet(backends: Mapping[Role, Backend], asks: Mapping[Role, Mapping[str, str]]) -> Iterator[tuple[Role, bool, str]]:
    """Yield what backends are not shown to honour: the role, if it rules a run out, and a description.

    Kernels declare it; the engine's own backends are measured. A candidate of the engine's own is run whatever it does.
    """
    for role, backend in backends.items():
        for feature, line in asks[role].items():
            if backend.is_kernel and feature in FEATURES and feature not in map(feature_of, backend.features):
                yield role, True, f"{backend} does not declare the {feature} that the model asks for ({line})"
    roles = [role for role, backend in backends.items() if not backend.is_kernel and not backend.is_url]
    if not any(asks[role] for role in roles):
        return
    from assay.harness.checks.honours import ATTRIBUTES, measure

    measurable = {attribute.name for attribute in ATTRIBUTES}
    names = {name for role in roles for name in asks[role] if name in measurable}
    if not names:
        return
    measured = measure(sorted({backends[role].name for role in roles}), names).backends
    results = {result.backend: result for result in measured}
    for role in roles:
        result = results[backends[role].name]
        for feature, line in ((name, line) for name, line in asks[role].items() if name in names):
            state, what = result.state(feature), f"the {feature} that the model asks for ({line})"
            if state in _DOES:
                cells = [cell for cell in result.measured if cell.attribute == feature and cell.state != "honours"]
                nearly = all(cell.state == "wrong" and cell.says.startswith("one key") for cell in cells)
                yield (
                    role,
                    role == "reference" and not nearly,
                    f"{result.backend} {_DOES[state]} {what}{_detail(result, feature, state)}",
                )
            elif state != "honours":
                why = result.problem or _detail(result, feature, "not measured").lstrip(": ")
                yield role, False, f"{result.backend} could not be measured on {what}: {why}"


def _detail(result: BackendResult, feature: str, state: str) -> str:
    """Say in which phases, and what else was computed or raised."""
    cells = [cell for cell in result.measured if cell.attribute == feature]
    phases = [cell.phase for cell in cells if cell.state == state]
    says = next((cell.says for cell in cells if cell.state == state and cell.says), "")
    where = "" if len(phases) == len(cells) else f" in {' and '.join(phases)}"
    return f"{where}: {says}" if says else where
