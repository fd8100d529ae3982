"""The requirements of a run in this environment, one finding each: whether it is met, and if not, how to meet it.

Nothing is started or installed; only the candidate's kernel is called once. The base install is enough.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.backend import Backend
from assay.harness.config import RunSpec
from assay.harness.errors import AssayError, ExitCode
from assay.harness.extras import DISTRIBUTION, install, missing_packages
from assay.harness.schema import RULE, Part
from assay.harness.sides import Device, Engine, Side, profile_of
from assay.harness.text import listed, one_line

Status = Literal["ok", "missing", "not needed"]
SCHEMA: Literal["assay.doctor/1"] = "assay.doctor/1"
_GIB = 1024**3
# Free disk space for a run's folder: the default run writes 0.1 GiB of evidence, and a replay pack up to 0.5.
_LEAST_FREE_GIB = 1.0
# A requirement's status, what was found, and how to meet it if it is missing.
_Found = tuple[Status, str, str]


class _RunNeed(Part):
    """One requirement of a run."""

    id: str = Field(description='stable, such as "sglang"')
    status: Status
    found: str
    do: str = Field("", description="what to do if it is missing")


class Examination(Part):
    __doc__ = f"The findings of `assay doctor`. {RULE}"

    schema_id: Literal["assay.doctor/1"] = Field(SCHEMA, serialization_alias="schema")
    device: Device
    examined: tuple[_RunNeed, ...]

    @property
    def exit_code(self) -> ExitCode:
        """No verdict if something is missing."""
        missing = any(examined.status == "missing" for examined in self.examined)
        return ExitCode.NO_VERDICT if missing else ExitCode.PASS


def examine(spec: RunSpec, candidate_named: bool = True) -> Iterator[_RunNeed]:
    """Check the requirements of this spec's run, one after the other; the candidate's first call comes last.

    A check that fails is itself a finding, so that the others still run.

    Args:
        spec: the run's spec.
        candidate_named: whether the user named the candidate; if not, SGLang's own backends are checked instead of the default.
    """
    device, candidate = spec.device, spec.candidate.backend
    if not candidate_named:
        candidate = spec.reference.backend
        spec = spec.model_copy(update={"candidate": spec.reference})
    own = f"{spec.reference.engine}:{candidate}"
    steps: dict[str, Callable[[], _Found]] = {
        "check": _check, "packages": _packages,
        **{side.engine: partial(_engine, side) for side in spec.sides.values()}, "gpu": lambda: _gpu(device),
        "memory": lambda: _memory(device, spec.reference), "triton": lambda: _triton(device, candidate),
        "compiler": lambda: _compiler(device), "disk": _disk, "asked": lambda: _asked(spec),
        "candidate": lambda: _candidate(spec.candidate) if candidate_named else _own_backends(spec.reference.engine, device),
        "first-call": lambda: _first_call(device, spec.candidate, "" if candidate_named else own),
    }  # fmt: skip
    for id_, step in steps.items():
        try:
            status, says, do = step()
        except AssayError as error:
            status, says, do = "missing", one_line(error.found.rstrip("."), 300), error.do
        except (ImportError, OSError) as error:
            status, says, do = "missing", one_line(repr(error), 300), f"make this work: {id_}"
        yield _RunNeed(id=id_, status=status, found=says, do=do if status == "missing" else "")
        if (id_, status) == ("candidate", "missing"):
            return


def _needed(here: bool, found: str, do: str) -> _Found:
    return "ok" if here else "missing", found, do


def _absent(needed: bool, found: str, do: str) -> _Found:
    """Report something absent that may not be needed."""
    return "missing" if needed else "not needed", found, do


def _check() -> _Found:
    """Check that kernels can be checked here, which needs only the base install."""
    if missing := missing_packages():
        return "missing", f"not installed: {', '.join(missing)}", f'pip install "{DISTRIBUTION}"'
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    return "ok", f"assay check is ready: torch {torch.__version__} on {where}", ""


def _packages() -> _Found:
    missing = missing_packages("serve")
    says = f"not installed: {', '.join(missing)}" if missing else f"all packages of {DISTRIBUTION}[serve]"
    return _needed(not missing, says, install("serve"))


def _engine(side: Side) -> _Found:
    from assay.harness.engines import registry
    from assay.harness.engines.environments import check_interpreter, python_of

    profile = profile_of(side.engine)
    if python := python_of(side):
        looked = check_interpreter(python, profile)
        installed = next(filter(None, map(looked.version_of, profile.distributions)), "")
    else:
        installed = registry.check_version(side.engine)
    about = f"{installed or 'a checkout without a version'}, {len(registry.backends(side.engine))} attention backends"
    return "ok", f"{about}{f', started by {python}' if python else ''}", ""


def _gpu(device: Device) -> _Found:
    import torch

    from assay.harness.run.preflight import check_gpu

    if device == "cpu":
        here = "this machine has a GPU, for --device=cuda" if torch.cuda.is_available() else "this machine has no GPU"
        return "not needed", f"--device is cpu; {here}", ""
    check_gpu()
    return "ok", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", ""


def _memory(device: Device, side: Side) -> _Found:
    from assay.harness.engines import memory
    from assay.harness.engines.model import is_hub_name, resolve_model
    from assay.harness.run.preflight import check_memory

    if is_hub_name(side.model) and not Path(side.model).exists():  # a run would download it
        return "not needed", f"{side.model} is not on this machine yet", ""
    free = memory.available_bytes(device)
    if device == "cuda" and not free:
        return "missing", "no GPU memory that could be read", "make nvidia-smi work"
    size = memory.model_bytes(resolve_model(side.model, side.flags))
    check_memory(device, side, size, free)
    both = memory.hold_both(device, [side, side], [size, size], free)
    where = "on the GPU" if device == "cuda" else "on this machine"
    how = "two servers fit at the same time" if both else "one server at a time, which takes longer"
    return "ok", f"{free / _GIB:.1f} GiB free {where}: {how}", ""


def _triton(device: Device, candidate: str) -> _Found:
    if importlib.util.find_spec("triton") is None:
        return _absent(device == "cuda" or candidate.startswith("sage_attn"), "not installed", install("sage"))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    how = "kernels are interpreted, without a GPU" if interpreted else "kernels are compiled"
    return "ok", f"{version('triton')}; {how}", ""


def _compiler(device: Device) -> _Found:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    tools = {"a C compiler": compiler, "Python.h": headers.exists() and headers, "ninja": shutil.which("ninja")}
    if absent := [name for name, path in tools.items() if not path]:
        do = "install a C compiler and Python's headers (Debian: apt-get install gcc python3-dev), and ninja (pip), on PATH"
        return _absent(device == "cuda", f"not found: {', '.join(absent)}; kernels are compiled with it on a GPU", do)
    return "ok", ", ".join(map(str, tools.values())), ""


def _disk() -> _Found:
    places = {"here": Path.cwd(), "temporary folder": Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(path).free / _GIB for name, path in places.items()}
    writable = all(os.access(path, os.W_OK) for path in places.values())
    room = ", ".join(f"{amount:.1f} GiB free ({name})" for name, amount in free.items())
    room += "" if writable else "; one of them is not writable"
    return _needed(writable and min(free.values()) >= _LEAST_FREE_GIB, room, "make room, or work in another folder")


def _asked(spec: RunSpec) -> _Found:
    """Check that the engine's backends honour what the model's layers ask for."""
    from assay.harness.engines.model import resolve_model
    from assay.harness.run.preflight import asked_of, served_in, unmet

    asked = asked_of(spec, {role: resolve_model(side.model, side.flags) for role, side in spec.sides.items()})
    asks = sorted({feature for features in asked.values() for feature in features})
    if not asks:
        return "not needed", "the model's layers ask for plain attention", ""
    backends = {role: Backend.parse(side.backend) for role, side in spec.sides.items()}
    served = {
        role: served_in(resolve_model(side.model, side.flags), side, spec.device) for role, side in spec.sides.items()
    }
    refused = list(unmet(backends, asked, served, spec.sides))
    enough = not any(fatal for _, fatal, _ in refused)
    says = "; ".join(f"the {role} {text}" for role, _, text in refused) or f"both sides honour {', '.join(asks)}"
    return _needed(enough, one_line(says, 300), "name another --reference; see assay backends --honours")


def _candidate(side: Side) -> _Found:
    candidate = side.backend
    backend = Backend.parse(candidate)
    if not backend.is_kernel:
        from assay.harness.engines.registry import checked_backend

        checked_backend(side.engine, "--candidate", candidate)
        return "ok", f"{candidate}, {_kind(side)}", ""
    from assay.harness.attention.kernels import find

    find("--candidate", candidate)
    return "ok", f"{candidate} can be imported; it computes {' and '.join(backend.phases)}", ""


def _own_backends(engine: Engine, device: Device) -> _Found:
    """List the engine's own backends that can be built here, if no candidate is named."""
    from assay.harness.attention.call import KernelRefused
    from assay.harness.attention.kernels import load
    from assay.harness.engines.registry import backends

    here, names = [], backends(engine)
    for name in names:
        with suppress(KernelRefused, ImportError):
            load(f"{engine}:{name}")
            here.append(name)
    of = f"of {profile_of(engine).title}'s {len(names)} backends, {listed(here) or 'none'} can be used on {device}"
    says = f"no candidate is named; {of}"
    return _needed(bool(here), says, "see assay backends for what each of them lacks")


def _first_call(device: Device, side: Side, named: str) -> _Found:
    """Call the candidate's kernel once, on a sequence with a cached prefix, to find errors that appear only when it runs."""
    import torch

    from assay.harness.attention.kernels import exits_raised, run_kernel
    from assay.harness.attention.sample_calls import call_of

    candidate = named or side.backend
    backend = Backend.parse(candidate)
    if not backend.is_kernel:
        return "not needed", f"{_kind(side)} runs in a server only", ""
    if device == "cuda" and not torch.cuda.is_available():
        return "not needed", "this machine has no GPU for it", ""
    phase, dtype = backend.phases[0], torch.float16 if device == "cuda" else torch.float32
    call = call_of([(1 if phase == "decode" else 4, 20)], (2, 1), 64, dtype, device)
    try:
        with exits_raised():
            out = run_kernel(backend.name, backend.kernel(), call)
    except (Exception, SystemExit) as error:  # the kernel's exit must not become this command's
        problem = one_line(f"its first call ({phase}) raised {type(error).__name__}: {error}", 300)
        return "missing", problem, f"run assay check {candidate}, which lists the calls that fail"
    finite = bool(out.isfinite().all())
    says = f"an output of shape {tuple(out.shape)}{'' if finite else ', which is not finite'}"
    return _needed(finite, says, f"run assay check {candidate}")


def _kind(side: Side) -> str:
    own = f"one of {profile_of(side.engine).title}'s own backends"
    return "a server that assay did not start" if Backend.parse(side.backend).is_url else own
