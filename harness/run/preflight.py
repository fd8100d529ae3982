"""Tests of whether this environment can serve a run at all, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from assay.harness.engines.sglang import memory
from assay.harness.errors import ChangedError, EvidenceError, ExitCode, UsageError
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.fingerprint.stored import read_fingerprint
from assay.harness.judge.baselines import since_accepted
from assay.harness.sides import Device, Side

if TYPE_CHECKING:
    from assay.harness.run.plan import Plan

GIB = memory.GIB
_CPU_BACKENDS = ("torch_native", "triton", "flex_attention", "intel_amx")
"""SGLang's own backends that it serves on the CPU, Triton with interpreted kernels. The others (0.5.23) end a server while it
starts: they check for the architecture of a GPU, or for packages that need one.
"""
_PARALLEL = ("--tp-size", "--tensor-parallel-size", "--tp", "--pp-size", "--pipeline-parallel-size", "--pp")
_SMALLER = ("--quantization", "--load-format", "--cpu-offload-gb")
"""Flags with which a model takes less memory than its files, by an amount that is not known before."""


def check_environment(plan: Plan) -> None:
    """Refuse a device that is not there, and a model of which the device cannot hold even one server.

    A role that is a URL runs elsewhere: if both do, nothing is checked.

    Raises:
        UsageError: it is not there, or the model does not fit.
    """
    device, backends = plan.spec.device, (plan.reference, plan.candidate)
    if all(backend.is_url for backend in backends):
        return
    if device == "cuda":
        check_gpu()
    else:
        _check_cpu([backend.name for backend in backends if not backend.is_url and not backend.is_kernel])
    free = memory.available_bytes(device)
    for role, folder in plan.models.items():
        check_memory(device, plan.spec.sides[role], memory.model_bytes(folder), free)


def check_fingerprint(name: str) -> None:
    """Refuse an accepted fingerprint that is missing or damaged; empty for none.

    Raises:
        UsageError: it is missing or damaged.
    """
    if not name:
        return
    try:
        read_fingerprint(Path(name))
    except (UsageError, EvidenceError) as error:
        raise UsageError(f"--fingerprint: {error.found}", error.expected, error.do) from None


def check_accepted(accepted: Path, made: Fingerprint) -> None:
    """Refuse a server that is not what was accepted.

    Args:
        accepted: file of the accepted fingerprint, whose engine has the settings that were accepted.
        made: the server's.

    Raises:
        ChangedError: a difference changes outputs, or nothing could be compared.
    """
    known = read_fingerprint(accepted)
    diff = since_accepted(known, made)
    if diff.exit_code == ExitCode.PASS:
        return
    says = [difference.says for difference in diff.undeclared] or ["nothing of it could be compared"]
    more = f"; and {len(says) - 1} more" if len(says) > 1 else ""
    raise ChangedError(
        f"The candidate (B) is not what {accepted} (A) accepts: {says[0]}{more}.",
        "what was accepted",
        "make the candidate's with assay fingerprint --out, and see assay compare of both; accept it if it is meant",
        details="\n".join(says),
    )


def _check_cpu(names: Sequence[str]) -> None:
    for name in names:
        if name not in _CPU_BACKENDS:
            raise UsageError(
                f"{name} does not run on --device=cpu.",
                f"one of SGLang's backends that run on the CPU ({', '.join(_CPU_BACKENDS)}), or a kernel",
                "name one of these, or use --device=cuda on a machine with a GPU",
            )


def check_gpu() -> None:
    """Refuse ``--device=cuda`` where PyTorch sees no GPU.

    Raises:
        UsageError: it sees none; the message states whether it could.
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
        f"--device is cuda, and there is no GPU that can be used: {why}.",
        "a GPU that nvidia-smi lists, and a CUDA build of PyTorch",
        "use --device=cpu, or fix the driver, CUDA_VISIBLE_DEVICES or PyTorch (nvidia-smi lists what the driver sees)",
    )


def check_memory(device: Device, side: Side, model_bytes: int | None, available_bytes: int) -> None:
    """Refuse a model of which the device cannot hold even one server.

    Args:
        device: of the servers.
        side: model and flags of the server.
        model_bytes: bytes of the weights on disk; None if unknown, which nothing follows from.
        available_bytes: free memory of the device; 0 if unknown.

    Raises:
        UsageError: it does not fit.
    """
    flags = [flag.partition("=")[0] for flag in side.flags]
    if not model_bytes or not available_bytes or any(flag in _PARALLEL + _SMALLER for flag in flags):
        return
    share = memory.mem_fraction(side.flags)
    needed = memory.one_server_bytes(device, model_bytes)
    usable = share * available_bytes if device == "cuda" else available_bytes
    if needed <= usable:
        return
    fits_alone = device == "cuda" and needed <= 0.9 * available_bytes
    part = f"{share:.0%} of " if device == "cuda" else ""
    raise UsageError(
        f"--model {side.model} does not fit: a server needs {needed / GIB:.1f} GiB, and {part}{available_bytes / GIB:.1f} GiB "
        f"{'of GPU memory ' if device == 'cuda' else ''}is free.",
        "memory for the weights and a KV cache in one server at least",
        f"--servers=in-turn --engine-arg=--mem-fraction-static={_fraction(needed / available_bytes):.2f}"
        if fits_alone
        else "use a smaller --model, or free memory",
    )


def _fraction(least: float) -> float:
    """Return a memory share above `least`, on a grid of 0.05."""
    return min(0.9, round(least + 0.05 - (least % 0.05), 2))
