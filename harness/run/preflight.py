"""Refusals before a server starts: runs that this machine cannot serve, and model features that a backend does not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.harness.attention.call import FEATURES, default_device
from assay.harness.attention.forms import feature_of
from assay.harness.backend import Backend
from assay.harness.engines import memory, registry
from assay.harness.engines.environments import check_interpreter, python_of
from assay.harness.engines.model import model_shape
from assay.harness.errors import ChangedError, ExitCode, UsageError
from assay.harness.evidence.fingerprint import Fingerprint, read_fingerprint
from assay.harness.evidence.honours import BackendResult
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.parts import COMPARED
from assay.harness.progress import ProgressDisplay
from assay.harness.sides import ROLES, Device, Role, Side, flag_values, profile_of
from assay.harness.text import listed

if TYPE_CHECKING:
    from assay.harness.config import RunSpec
    from assay.harness.run.plan import Plan

GIB = memory.GIB
# Differences in tokens after which two engines do not get the same input.
_OF_TOKENS = ("tokens.bare", "tokens.texts", "tokens.chats", "tokens.counts")
_PARALLEL = (
    "--tp-size",
    "--tensor-parallel-size",
    "--tp",
    "-tp",
    "--pp-size",
    "--pipeline-parallel-size",
    "--pp",
    "-pp",
)
# Flags that shrink a model's memory below the size of its files, by an amount that is not known before.
_SMALLER = ("--quantization", "--load-format", "--cpu-offload-gb")
# The verb for a backend that does not honour a feature, by state.
_DOES = {"ignores": "ignores", "refuses": "refuses", "crashes": "fails on", "wrong": "computes something else for"}


def check_environment(plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse an engine that is too old or not installed, a missing device, or a device that cannot hold even one server.

    A role that is a URL runs elsewhere: if both do, nothing is checked. Where a side has packages laid over its interpreter, their
    environment is made.

    Args:
        plan: the run.
        say: receives a line for each environment that is made, and for each requirement that is not met.

    Raises:
        UsageError: an engine or the device is missing, an environment cannot be made, or the model does not fit.
    """
    device, backends = plan.spec.device, (plan.reference, plan.candidate)
    if all(backend.is_url for backend in backends):
        return
    started = [side for role, side in plan.spec.sides.items() if not plan.backend(role).is_url]
    for side in started:
        if python := python_of(side, say):
            check_interpreter(python, profile_of(side.engine))
        else:
            registry.check_version(side.engine)
    if device == "cuda":
        check_gpu()
    else:
        _check_cpu([side for side in started if not Backend.parse(side.backend).is_kernel])
    free = memory.available_bytes(device)
    for role, folder in plan.models.items():
        check_memory(device, plan.spec.sides[role], memory.model_bytes(folder), free)


def check_accepted(accepted: Path, made: Fingerprint) -> None:
    """Refuse a server that differs from the accepted one.

    Args:
        accepted: file of the accepted fingerprint, whose engine has the accepted settings.
        made: the server's fingerprint.

    Raises:
        ChangedError: a difference changes outputs, or nothing or no setting of the model could be compared.
    """
    known = read_fingerprint(accepted)
    asked = {"asked": {**known.asked, **made.asked}}  # every difference counts, those in requested settings too
    diff = compare_fingerprints(known.model_copy(update=asked), made.model_copy(update=asked))
    if diff.exit_code == ExitCode.PASS:
        return
    unread = "nothing of it could be compared"
    if diff.compared and diff.unread:
        unread = f"settings of the model were not compared ({diff.unread})"
    elif diff.compared and diff.lost:
        unread = f"only one side has the {listed(diff.lost)} of what is served"
    says = [difference.says for difference in diff.undeclared] or [unread]
    more = f"; and {len(says) - 1} more" if len(says) > 1 else ""
    raise ChangedError(
        f"The candidate (B) is not what {accepted} (A) accepts: {says[0]}{more}.",
        "a server that matches the accepted fingerprint",
        "make the candidate's with assay fingerprint --out, and see assay compare of both; accept it if it is meant",
        details="\n".join(says),
    )


def check_tokens(reference: Fingerprint, candidate: Fingerprint) -> None:
    """Refuse two engines that make other tokens of the same texts or chats: every later difference would only follow from it.

    Raises:
        ChangedError: they do; the message names the first text, and where its ids part.
    """
    if reference.tokens is None or candidate.tokens is None:
        return
    differ = [each for each in COMPARED["tokens"](reference.tokens, candidate.tokens) if each.name in _OF_TOKENS]
    if differ:
        raise ChangedError(
            f"The two engines make different tokens (A is the reference, B the candidate): {differ[0].says}.",
            "the same token ids for the same texts and chats, so that the engines are compared on the same input",
            "give both the same tokenizer and chat template, with --reference-arg and --candidate-arg",
            details="\n".join(line for each in differ for line in (each.says, *each.details)),
        )


def _check_cpu(sides: Sequence[Side]) -> None:
    for side in sides:
        profile = profile_of(side.engine)
        if side.backend not in profile.cpu_backends:
            raise UsageError(
                f"{side.backend} does not run on --device=cpu.",
                f"one of {profile.title}'s backends that run on the CPU ({', '.join(profile.cpu_backends)}), or a kernel",
                "name one of these, or use --device=cuda on a machine with a GPU",
            )


def check_gpu() -> None:
    """Refuse ``--device=cuda`` if PyTorch sees no GPU.

    Raises:
        UsageError: it sees none; the message says whether PyTorch was built for one.
    """
    import torch

    if torch.cuda.is_available():
        return
    built = torch.version.cuda
    why = (
        f"PyTorch {torch.__version__} is built for CUDA {built} and sees none" if built else
        f"PyTorch {torch.__version__} is built without CUDA"
    )  # fmt: skip
    raise UsageError(
        f"--device is cuda, but no GPU can be used: {why}.",
        "a GPU that nvidia-smi lists, and a CUDA build of PyTorch",
        "use --device=cpu, or fix the driver, CUDA_VISIBLE_DEVICES or PyTorch (nvidia-smi lists what the driver sees)",
    )


def check_memory(device: Device, side: Side, model_bytes: int | None, available_bytes: int) -> None:
    """Refuse a model if the device cannot hold even one server; an unknown size refuses nothing.

    Args:
        model_bytes: bytes of the weights on disk, or None if unknown.
        available_bytes: free memory of the device, or 0 if unknown.

    Raises:
        UsageError: it does not fit.
    """
    flags = [flag.partition("=")[0] for flag in side.flags]
    if not model_bytes or not available_bytes or any(flag in _PARALLEL + _SMALLER for flag in flags):
        return
    needs = profile_of(side.engine).memory
    share = memory.mem_fraction(side)
    needed = memory.one_server_bytes(needs, device, model_bytes)
    usable = share * available_bytes if device == "cuda" else available_bytes
    if needed <= usable:
        return
    fits_alone = device == "cuda" and needed <= 0.9 * available_bytes
    part = f"{share:.0%} of " if device == "cuda" else ""
    raise UsageError(
        f"--model {side.model} does not fit: a server needs {needed / GIB:.1f} GiB, and {part}{available_bytes / GIB:.1f} GiB "
        f"{'of GPU memory ' if device == 'cuda' else ''}is free.",
        "memory for the weights and a KV cache in at least one server",
        f"--servers=in-turn --engine-arg={needs.share_flag}={_fraction(needed / available_bytes):.2f}"
        if fits_alone
        else "use a smaller --model, or free memory",
    )


def _fraction(least: float) -> float:
    """Return a memory share above `least`, on a grid of 0.05."""
    return min(0.9, round(least + 0.05 - (least % 0.05), 2))


def check_asked(plan: Plan, display: ProgressDisplay) -> None:
    """Refuse a reference that does not compute what the model's layers ask for, or a kernel that does not declare it.

    Features that the candidate does not honour, or that could not be measured here, are reported. Plain attention costs nothing.

    Raises:
        UsageError: the reference does not compute it, or the kernel does not declare it.
    """
    backends, device = {role: plan.backend(role) for role in ROLES}, plan.spec.device
    served = {role: served_in(plan.models[role], plan.spec.sides[role], device) for role in ROLES}
    for role, fatal, text in unmet(backends, asked_of(plan.spec, plan.models), served, plan.spec.sides):
        if fatal and plan.backend(role).is_kernel:
            expected = "a kernel that declares what the model's layers ask for, in @declares(features=...)"
            raise UsageError(
                f"The {role} {text}.", expected, "declare it if the kernel computes it, or name another --model"
            )
        if fatal:
            expected = "a reference that computes what the model's layers ask for"
            do = "name another --reference; assay backends --honours shows what each backend does"
            raise UsageError(f"The reference {text}.", expected, do)
        display.say(f"The {role} {text}.", stays=True)


def asked_of(spec: RunSpec, models: Mapping[Role, Path]) -> dict[Role, Mapping[str, str]]:
    """Read what the layers of each side's model ask for, given its flags: a line of the configuration by feature."""
    asks = {role: model_shape(models[role], side.flags).asks for role, side in spec.sides.items()}
    return {role: of if profile_of(spec.sides[role].engine).instrumented else {} for role, of in asks.items()}


def ignored_of(model: Path, side: Side, measuring: bool = True) -> tuple[str, ...] | None:
    """List the features that the model's layers ask for and a side's backend is not shown to compute, a sentence each.

    Return None if the engine's own backend would have to be measured, which takes device memory, and `measuring` is False.

    Raises:
        UsageError: the model's configuration cannot be read.
    """
    asks, backend = model_shape(model, side.flags).asks, Backend.parse(side.backend)
    if asks and not measuring and not backend.is_kernel:
        return None
    served: dict[Role, tuple[str, int]] = {"candidate": served_in(model, side, default_device())} if asks else {}
    return tuple(text for _, _, text in unmet({"candidate": backend}, {"candidate": asks}, served, {"candidate": side}))


def served_in(model: Path, side: Side, device: str) -> tuple[str, int]:
    """Return a side's head_dim and the dtype in which its layers compute: float32 on a CPU unless a flag names another."""
    shape = model_shape(model, side.flags)
    usual = "float32" if device == "cpu" else shape.dtype
    named = flag_values(side.flags).get("--dtype", "auto")
    return {"auto": usual, "half": "float16", "float": "float32"}.get(named, named), shape.head_dim


def unmet(
    backends: Mapping[Role, Backend],
    asks: Mapping[Role, Mapping[str, str]],
    served: Mapping[Role, tuple[str, int]] = {},
    sides: Mapping[Role, Side] = {},
) -> Iterator[tuple[Role, bool, str]]:
    """Yield the features that backends are not shown to honour: the role, whether this rules a run out, and a description.

    Kernels declare features; the engine's own backends are measured. A candidate of the engine's own runs in any case.

    Args:
        asks: the features that each role's model asks for.
        served: dtype and head_dim to measure in, by role; the usual ones for a missing role.
        sides: the engine and its Python, by role; SGLang in the Python that runs assay for a missing role.
    """
    for role, backend in backends.items():
        for feature, line in asks[role].items():
            if backend.is_kernel and feature in FEATURES and feature not in map(feature_of, backend.features):
                yield role, True, f"{backend} does not declare the {feature} that the model asks for ({line})"
    roles = [role for role, backend in backends.items() if not backend.is_kernel and not backend.is_url and asks[role]]
    if not roles:
        return
    from assay.harness.checks.honours import ATTRIBUTES, measure

    names = {name for role in roles for name in asks[role]} & {attribute.name for attribute in ATTRIBUTES}
    if not names:
        return
    results: dict[tuple[Any, ...], BackendResult] = {}
    for role in roles:
        side = sides.get(role) or Side(backend=backends[role].name)
        key = name, shape, engine, python = backends[role].name, served.get(role), side.engine, python_of(side)
        if key not in results:
            (results[key],) = measure([name], names, model=shape, engine=engine, python=python).backends
        result = results[key]
        for feature, line in ((name, line) for name, line in asks[role].items() if name in names):
            state, what = result.state(feature), f"the {feature} that the model asks for ({line})"
            if state in _DOES:
                cells = [cell for cell in result.measured if cell.attribute == feature and cell.state != "honours"]
                # A window that is off by one key is nearly right.
                nearly = all(cell.state == "wrong" and cell.says.startswith("one key") for cell in cells)
                text = f"{result.backend} {_DOES[state]} {what}{_detail(result, feature, state)}"
                yield role, role == "reference" and not nearly, text
            elif state != "honours":
                why = result.problem or _detail(result, feature, "not measured").lstrip(": ")
                yield role, False, f"{result.backend} could not be measured on {what}: {why}"


def _detail(result: BackendResult, feature: str, state: str) -> str:
    """Describe the phases, and what was computed or raised instead."""
    cells = [cell for cell in result.measured if cell.attribute == feature]
    phases = [cell.phase for cell in cells if cell.state == state]
    says = next((cell.says for cell in cells if cell.state == state and cell.says), "")
    where = "" if len(phases) == len(cells) else f" in {' and '.join(phases)}"
    return f"{where}: {says}" if says else where
