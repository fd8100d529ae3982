"""The features to toggle, checked; nothing is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.evals.probes import ProbeLoad, probe_load
from assay.harness.config import INVARIANCE_FLAGS, RunSpec
from assay.harness.engines import registry
from assay.harness.engines.features import Feature
from assay.harness.engines.model import configuration, model_shape
from assay.harness.errors import UsageError
from assay.harness.judge.invariance_arms import (
    BASE,
    Arm,
    base_of,
    closed,
    in_order,
    pairs,
    possible,
    speculation_of,
)
from assay.harness.run.plan import Plan
from assay.harness.sides import flag_values
from assay.harness.text import did_you_mean

# Prompts that every arm answers greedily, and the most tokens of an answer.
_TEXTS, _TEXT_TOKENS = 4, 32


@dataclass(frozen=True)
class InvariancePlan:
    """A checked invocation.

    Attributes:
        run: backend, model, device and engine flags.
        known: the features that arms toggle, by id.
        every: all features that can be toggled here; those that no arm toggles are off.
        not_covered: features that cannot be toggled here, with the reason by id, or none if features were named.
        arms: in the order in which they run, without the base.
        together: whether one arm has all features, rather than every two of them some arm.
        asked: the features that were named; empty for all.
        load: the probes.
    """

    run: Plan
    known: Mapping[str, Feature]
    every: Mapping[str, Feature]
    not_covered: Mapping[str, str]
    arms: tuple[Arm, ...]
    together: bool
    asked: tuple[str, ...]
    load: ProbeLoad

    @property
    def dtype(self) -> str:
        """The dtype of the activations."""
        asked = flag_values(self.run.spec.reference.flags).get("--dtype", "")
        own = model_shape(self.run.model).dtype or "bfloat16"
        default = "float32" if self.run.spec.device == "cpu" else own
        return {"half": "float16", "float": "float32", "auto": own}.get(asked, asked) or default

    @property
    def command(self) -> str:
        """The command that repeats the invocation."""
        words = ["assay", "invariance", *self.run.spec.given_flags(INVARIANCE_FLAGS)]
        words += [f"--features={','.join(self.asked)}"] if self.asked else []
        words += ["--together"] if self.together else []
        return shlex.join(words)


def compared_spec(spec: RunSpec) -> RunSpec:
    """Make the spec to be compared: one server, the reference's, and as little as possible of a run."""
    return spec.changed(
        suites=("greedy",), questions=1, greedy_prompts=_TEXTS, max_tokens=_TEXT_TOKENS, candidate=spec.reference
    )


def gpu_count(device: str) -> int:
    """Count the GPUs of this machine, or return 0 if the device is not a GPU."""
    if device != "cuda":
        return 0
    import torch

    return torch.cuda.device_count()


def plan_invariance(run: Plan, asked: Sequence[str] = (), together: bool = False, gpus: int = 0) -> InvariancePlan:
    """Check what is to be compared.

    Args:
        asked: ids of the features to toggle, or empty for all that can be.
        together: turn all of `asked` on in one arm, instead of a covering array.
        gpus: GPUs of the machine.

    Raises:
        UsageError: an unknown feature, one that cannot be toggled here, or features that exclude each other where all are to be on.
    """
    device = run.spec.device
    every = registry.features(run.spec.reference.engine).features_of(device)
    for name in asked:
        if name not in every:
            raise UsageError(
                f"--features: {name} is not a feature.",
                f"some of {', '.join(every)}",
                did_you_mean(name, tuple(every)) or "name some of these, separated by commas",
            )
    config = configuration(run.model)
    side = run.spec.reference
    own = flag_values(side.flags), {**os.environ, **side.environment}, str(run.reference)
    reasons = {
        id_: why
        for id_, feature in every.items()
        if (why := feature.unavailable(device, gpus, config) or feature.decided(*own))
    }
    while needing := {id_: need for id_ in every.keys() - reasons for need in every[id_].requires if need in reasons}:
        reasons |= {id_: f"it needs {need}: {reasons[need]}" for id_, need in needing.items()}
    wanted = closed(asked, every) if asked else frozenset(every) - reasons.keys()
    if refused := [id_ for id_ in (*asked, *sorted(wanted)) if id_ in reasons]:
        raise UsageError(
            f"--features: {refused[0]} cannot be switched here: {reasons[refused[0]]}.",
            "features that this machine supports, and that the engine's own flags leave to assay",
            "leave it out, or remove the flag that sets it",
        )
    known = {id_: feature for id_, feature in every.items() if id_ in wanted}
    shape = model_shape(run.model)
    return InvariancePlan(
        run=run,
        known=known,
        every={id_: feature for id_, feature in every.items() if id_ not in reasons},
        not_covered={} if asked else reasons,
        arms=tuple(_with_bases(_arms(known, together), known)),
        together=together,
        asked=tuple(asked),
        load=probe_load(device, shape.context, shape.vocabulary),
    )


def _arms(known: Mapping[str, Feature], together: bool) -> list[Arm]:
    if not together:
        return pairs(known)
    arm = frozenset(known)
    if not arm or not possible(arm, known):
        raise UsageError(
            f"--together: {', '.join(known) or 'nothing'} cannot be on together.",
            "features that do not exclude each other",
            "name them with --features",
        )
    return [arm]


def _with_bases(arms: Sequence[Arm], known: Mapping[str, Feature]) -> list[Arm]:
    """Add the arms that others are compared with."""
    bases = {of(arm, known) for arm in arms for of in (base_of, speculation_of)} - {BASE}
    return in_order({*arms, *bases}, known)
