"""The requirements of a run in this environment, one finding each: what is here, and what to do where something is missing.

Nothing is started and nothing is installed; the candidate's kernel is called once. It works where only the base install is there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from assay.harness.backend import Backend
from assay.harness.config import RunSpec
from assay.harness.errors import AssayError, ExitCode, UsageError
from assay.harness.extras import DISTRIBUTION, install, missing_packages
from assay.harness.schema import RULE, Part
from assay.harness.sides import Device, Side
from assay.harness.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

Status = Literal["ok", "missing", "not needed"]
SCHEMA: Literal["assay.doctor/1"] = "assay.doctor/1"
GIB = 1024**3
LEAST_FREE_GIB = 1.0
"""Free disk for a run's folder: the default run writes 0.1 GiB of evidence, and a replay pack up to 0.5."""
_MIN_PYTHON = (3, 11)


class _RunNeed(Part):
    """One thing that a run needs."""

    id: str = Field(description='stable, such as "sglang"')
    status: Status
    found: str
    do: str = Field("", description="what to do, where it is missing")


class Examination(Part):
    __doc__ = f"What `assay doctor` found. {RULE}"

    schema_id: Literal["assay.doctor/1"] = Field(SCHEMA, serialization_alias="schema")
    device: Device
    examined: tuple[_RunNeed, ...]

    @property
    def exit_code(self) -> ExitCode:
        """No verdict where something is missing."""
        missing = any(examined.status == "missing" for examined in self.examined)
        return ExitCode.NO_VERDICT if missing else ExitCode.PASS


def examine(spec: RunSpec) -> Iterator[_RunNeed]:
    """Examine what a run of this spec needs, one thing after the other; the candidate's first call comes last.

    An examination that fails is a finding, too, so that the others are still made.
    """
    device, candidate = spec.device, spec.candidate.backend
    steps: dict[str, Callable[[], _RunNeed]] = {
        "check": _check, "python": _python, "packages": _packages, "sglang": _sglang, "gpu": lambda: _gpu(device),
        "memory": lambda: _memory(device, spec.reference), "triton": lambda: _triton(device, candidate),
        "ninja": lambda: _ninja(device), "compiler": lambda: _compiler(device), "disk": _disk, "ports": _ports,
        "asked": lambda: _asked(spec), "candidate": lambda: _candidate(candidate),
        "first-call": lambda: _first_call(device, candidate),
    }  # fmt: skip
    for id_, step in steps.items():
        try:
            made = step()
        except AssayError as error:
            made = _RunNeed(id=id_, status="missing", found=one_line(error.found.rstrip("."), 300), do=error.do)
        except (ImportError, OSError) as error:
            made = _RunNeed(id=id_, status="missing", found=one_line(repr(error), 300), do=f"make this work: {id_}")
        yield made
        if (id_, made.status) == ("candidate", "missing"):
            return


def _python() -> _RunNeed:
    enough = sys.version_info[:2] >= _MIN_PYTHON
    where = f"{sys.version.split()[0]}, {sys.executable}"
    return _result("python", enough, where, f"use Python {_MIN_PYTHON[0]}.{_MIN_PYTHON[1]} or newer")


def _check() -> _RunNeed:
    """Examine if a kernel can be checked here: all that takes is the base install."""
    if missing := missing_packages():
        return _result("check", False, f"not installed: {', '.join(missing)}", f'pip install "{DISTRIBUTION}"')
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    return _RunNeed(id="check", status="ok", found=f"assay check is ready: torch {torch.__version__} on {where}")


def _packages() -> _RunNeed:
    missing = missing_packages("serve")
    packages = f"not installed: {', '.join(missing)}" if missing else f"all packages of {DISTRIBUTION}[serve]"
    return _result("packages", not missing, packages, install("serve"))


def _sglang() -> _RunNeed:
    from assay.harness.engines.sglang.catalog import MIN_SGLANG, sglang_backends
    from assay.harness.run.machine import installed_packages

    backends = sglang_backends()
    version = installed_packages().get("sglang", "")
    enough = _numbers(version) >= _numbers(MIN_SGLANG) if version else True  # a checkout on the path has no version
    versions = f"{version or 'a checkout without a version'}, {len(backends)} attention backends"
    return _result("sglang", enough, versions, f"install SGLang {MIN_SGLANG} or newer")


def _gpu(device: Device) -> _RunNeed:
    import torch

    from assay.harness.run.preflight import check_gpu

    if device == "cpu":
        here = "one is here, for --device=cuda" if torch.cuda.is_available() else "there is none"
        return _RunNeed(id="gpu", status="not needed", found=f"--device is cpu; {here}")
    check_gpu()
    return _RunNeed(id="gpu", status="ok", found=f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")


def _memory(device: Device, side: Side) -> _RunNeed:
    from assay.harness.engines.model import is_hub_name, resolve_model
    from assay.harness.engines.sglang import memory
    from assay.harness.run.preflight import check_memory

    if is_hub_name(side.model) and not Path(side.model).exists():  # a run would download it
        return _RunNeed(id="memory", status="not needed", found=f"{side.model} is not on this machine yet")
    if device == "cuda" and not memory.available_bytes("cuda"):
        return _RunNeed(
            id="memory", status="missing", found="no GPU memory that could be read", do="make nvidia-smi work"
        )
    size, free = (
        memory.model_bytes(resolve_model(side.model, side.flags)),
        memory.available_bytes(device),
    )
    check_memory(device, side, size, free)
    both = memory.hold_both(device, size, free, memory.mem_fraction(side.flags))
    where = "on the GPU" if device == "cuda" else "on this machine"
    how = "two servers fit at the same time" if both else "one server at a time, which takes longer"
    return _RunNeed(id="memory", status="ok", found=f"{free / GIB:.1f} GiB free {where}: {how}")


def _triton(device: Device, candidate: str) -> _RunNeed:
    if importlib.util.find_spec("triton") is None:
        needed = device == "cuda" or candidate.startswith("sage_attn")
        return _optional("triton", needed, "not installed", install("sage"))
    from importlib.metadata import version

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    how = "kernels are interpreted, without a GPU" if interpreted else "kernels are compiled"
    return _RunNeed(id="triton", status="ok", found=f"{version('triton')}; {how}")


def _ninja(device: Device) -> _RunNeed:
    path = shutil.which("ninja")
    if path:
        return _RunNeed(id="ninja", status="ok", found=path)
    missing = "not on PATH; FlashInfer and PyTorch compile kernels with it on a GPU"
    return _optional("ninja", device == "cuda", missing, "pip install ninja, with the environment's bin folder on PATH")


def _compiler(device: Device) -> _RunNeed:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    absent = [name for name, here in (("a C compiler", compiler), ("Python.h", headers.exists())) if not here]
    if not absent:
        return _RunNeed(id="compiler", status="ok", found=f"{compiler}, {headers}")
    do = "install a C compiler and Python's headers (Debian: apt-get install gcc python3-dev)"
    return _optional("compiler", device == "cuda", f"not found: {', '.join(absent)}; Triton compiles with it", do)


def _disk() -> _RunNeed:
    places = {"here": Path.cwd(), "temporary folder": Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(path).free / GIB for name, path in places.items()}
    writable = all(os.access(path, os.W_OK) for path in places.values())
    room = ", ".join(f"{amount:.1f} GiB free ({name})" for name, amount in free.items())
    if not writable:
        room += "; one of them cannot be written"
    return _result(
        "disk", writable and min(free.values()) >= LEAST_FREE_GIB, room, "make room, or work in another folder"
    )


def _ports() -> _RunNeed:
    """Listen on a port of 127.0.0.1 and reach it, as a server and assay do."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return _RunNeed(
                id="ports", status="ok", found=f"a server can listen on 127.0.0.1, for example on port {port}"
            )


def _asked(spec: RunSpec) -> _RunNeed:
    """Measure whether the engine's backends honour what the model's layers ask for."""
    from assay.harness.engines.model import resolve_model
    from assay.harness.run.asked import asked_of, unmet

    asked = asked_of(spec, {role: resolve_model(side.model, side.flags) for role, side in spec.sides.items()})
    asks = sorted({feature for features in asked.values() for feature in features})
    if not asks:
        return _RunNeed(id="asked", status="not needed", found="the model's layers ask for plain attention")
    refused = list(unmet({role: Backend.parse(side.backend) for role, side in spec.sides.items()}, asked))
    enough = not any(fatal for _, fatal, _ in refused)
    says = "; ".join(f"the {role} {text}" for role, _, text in refused) or f"both sides honour {', '.join(asks)}"
    return _result("asked", enough, one_line(says, 300), "name another --reference; see assay backends --honours")


def _candidate(candidate: str) -> _RunNeed:
    from assay.harness.engines.sglang.catalog import checked_backend

    backend = Backend.parse(candidate)
    if not backend.is_kernel:
        checked_backend("--candidate", candidate)
        return _RunNeed(id="candidate", status="ok", found=f"{candidate}, {_kind(backend)}")
    from assay.harness.attention.kernels import find

    find("--candidate", candidate)
    computes = f"{candidate} can be imported; it computes {' and '.join(backend.phases)}"
    return _RunNeed(id="candidate", status="ok", found=computes)


def _first_call(device: Device, candidate: str) -> _RunNeed:
    """Call the candidate's kernel once, on a sequence with a cached prefix: it shows what only running it shows."""
    import torch

    backend = Backend.parse(candidate)
    if not backend.is_kernel:
        return _RunNeed(id="first-call", status="not needed", found=f"{_kind(backend)} runs in a server only")
    if device == "cuda" and not torch.cuda.is_available():
        return _RunNeed(id="first-call", status="not needed", found="there is no GPU to make it on")
    out, shape = _call(backend, device)
    finite = bool(out.isfinite().all())
    output = f"an output of shape {tuple(shape)}{'' if finite else ', which is not finite'}"
    return _result("first-call", finite, output, f"assay check {candidate}")


def _call(backend: Backend, device: str) -> tuple[Tensor, tuple[int, ...]]:
    import torch

    from assay.harness.attention.kernels import exits_raised, run_kernel
    from assay.harness.attention.sample_calls import call_of

    phase = backend.phases[0]
    new = 1 if phase == "decode" else 4
    call = call_of([(new, 20)], (2, 1), 64, torch.float16 if device == "cuda" else torch.float32, device)
    try:
        with exits_raised():
            out = run_kernel(backend.name, backend.kernel(), call)
    except (
        Exception,
        SystemExit,
    ) as error:  # a kernel may raise anything, and its exit must not be taken for this command's
        raise UsageError(
            f"its first call ({phase}) raised {type(error).__name__}: {error}",
            "an output of the shape of q",
            f"assay check {backend.name}, which lists the calls on which it does so",
        ) from None
    return out, tuple(out.shape)


def _kind(backend: Backend) -> str:
    return "a server that assay did not start" if backend.is_url else "one of SGLang's own backends"


def _result(id_: str, enough: bool, found: str, do: str) -> _RunNeed:
    return _RunNeed(id=id_, status="ok" if enough else "missing", found=found, do="" if enough else do)


def _optional(id_: str, needed: bool, found: str, do: str) -> _RunNeed:
    """Report something absent that may not be needed."""
    return _RunNeed(id=id_, status="missing" if needed else "not needed", found=found, do=do if needed else "")


def _numbers(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: "0.5.23.post1" is (0, 5, 23)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
