"""Launching an SGLang server: `Launch` -> its command line and environment."""

from __future__ import annotations

import getpass
import math
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.harness.backend import Backend
from assay.harness.engines.environments import python_path
from assay.harness.engines.inside.control import DELEGATE, EVIDENCE, KERNEL
from assay.harness.errors import UsageError
from assay.harness.sides import Device, Role, flag_values, hide, hide_flags

STAND_INS = Path(__file__).parent / "stand_ins"
# Environment variables that assay extends, whoever sets them.
_EXTENDED = ("PYTHONPATH", "no_proxy", "NO_PROXY")
# Share of the free GPU memory that a server takes for weights and KV cache, so that two servers fit.
CUDA_MEM_FRACTION = 0.40

# Overriding any of these would break the comparison, or the proof that the right server answers.
_OWN_FLAGS = (
    "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend", "--model-path", "--device",
    "--host", "--port", "--served-model-name", "--api-key",
)  # fmt: skip
# SGLang's flag for the most tokens that are prefilled at once.
CHUNK_FLAG = "--chunked-prefill-size"
_CPU_FLAGS = ("--dtype", "float32", "--mem-fraction-static", "0.2", "--max-total-tokens", "32768", "--sleep-on-idle")
# Flags by which processes share a model, each with its other names. With data-parallel attention SGLang uses fewer.
_RANK_FLAGS = (
    ("--tp-size", "--tp", "--tensor-parallel-size"),
    ("--pp-size", "--pipeline-parallel-size"),
    ("--dp-size", "--dp", "--data-parallel-size"),
)
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOOPBACK = "127.0.0.1"
# These dumps keep a server up for 5 s (65 s with a GPU) after its scheduler has died, which would delay its detection as long.
# Set a variable to get its dump.
_CRASH_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


@dataclass(frozen=True)
class Launch:
    """Everything that decides how a server is launched, except its port and name.

    Attributes:
        role: which side of the comparison it is.
        backend: name of an attention backend that SGLang knows, or a kernel as ``module:function``.
        model: folder of the model.
        device: "cpu" or "cuda".
        evidence: folder for the files that the server's process writes; also its working directory.
        log: file that the server's output is appended to.
        decode_backend: the native backend to which a kernel without a decode phase delegates decode calls.
        startup_timeout: seconds until it must be ready.
        request_timeout: seconds until an answer must be complete.
        engine_args: the user's flags; they come last, so they override assay's.
        common: flags that both servers get because one of the backends forces them (`assay.harness.engines.sglang.common`).
        cpu_core: the core that a CPU server computes on; by default SGLang chooses (or SGLANG_CPU_OMP_THREADS_BIND).
        eager: no CUDA graphs. Must be the same for both servers, and True if either backend cannot be captured.
        extra: further environment variables: the side's, and ASSAY_SHADOW, ... (see `assay.harness.engines.inside.control`).
        interpreter: Python that starts the server, by default the one that runs assay.
    """

    role: Role
    backend: str
    model: Path
    device: Device
    evidence: Path
    log: Path
    decode_backend: str
    startup_timeout: float
    request_timeout: float
    engine_args: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    cpu_core: int | None = None
    eager: bool = True
    extra: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""

    def __post_init__(self) -> None:
        check_engine_args(self.engine_args)


def check_engine_args(engine_args: Sequence[str]) -> None:
    """Refuse flags that assay sets itself, and words that are neither a flag nor a flag's value.

    Raises:
        UsageError: one of them sets one of `_OWN_FLAGS`, or is not a flag.
    """
    for before, given in zip(("", *engine_args), engine_args, strict=False):
        if not given.startswith("-") and (not before.startswith("--") or "=" in before):
            raise UsageError(
                f"--engine-arg={given} is not a flag.",
                "a flag of SGLang, which begins with --, or a value right after its flag",
                "give --engine-arg=--FLAG, as in --engine-arg=--page-size=16",
            )
        flag = given.partition("=")[0]
        # argparse accepts any unambiguous prefix of a flag
        own = next(
            (own for own in _OWN_FLAGS if flag.startswith("--") and len(flag) > 2 and own.startswith(flag)), None
        )
        if own:
            raise UsageError(
                f"--engine-arg={hide_flags([given])[0]} sets {own}, which assay sets itself.",
                "a flag for both servers that assay does not set",
                "use assay's own --reference, --candidate, --model or --device, or remove it",
            )


def command(launch: Launch, port: int, name: str) -> list[str]:
    """Return the server's command line; ``name`` is the model name that it answers to."""
    profile = list(_CPU_FLAGS) if launch.device == "cpu" else ["--mem-fraction-static", f"{CUDA_MEM_FRACTION:.2f}"]
    # Nothing is captured on the CPU. With the flag, SGLang resolves the same arguments for every backend.
    if launch.eager or launch.device == "cpu":
        profile.append("--disable-cuda-graph")
    return [
        launch.interpreter or sys.executable, "-m", "sglang.launch_server",
        "--model-path", str(launch.model.resolve()),
        "--device", launch.device,
        "--attention-backend", launch.backend,
        "--host", _LOOPBACK,
        "--port", str(port),
        "--served-model-name", name,
        "--enable-cache-report",
        "--random-seed", "0",  # otherwise SGLang draws one for each server
        *profile,
        *launch.common,
        *launch.engine_args,
    ]  # fmt: skip


def settings(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that assay sets for a server, in addition to those ``inherited``.

    Variables of a side replace inherited ones. Assay's own folders and addresses are added to either.
    """
    inherited = {**inherited, **launch.extra}
    settings = kernel_settings(inherited)
    if launch.interpreter:  # its environment may have no assay, or another one
        settings["PYTHONPATH"] = python_path(launch.interpreter, settings["PYTHONPATH"])
    if launch.device == "cpu":
        settings["PYTHONPATH"] = f"{STAND_INS}:{settings['PYTHONPATH']}"
    no_proxy = ",".join(filter(None, [inherited.get("no_proxy") or inherited.get("NO_PROXY"), _LOOPBACK, "localhost"]))
    ours = {
        **settings,
        EVIDENCE: str(launch.evidence.resolve()),
        DELEGATE: launch.decode_backend,
        "HF_HUB_OFFLINE": "1",
        # /health answers 200 only after SGLang's own warm-up request. Without this, every query of /health would generate a token,
        # which takes a second and would be counted as an attention call.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # The warm-up request goes over the loopback address too.
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
    }
    ours |= {dump: "false" for dump in _CRASH_DUMPS if dump not in inherited}
    if path := Backend.parse(launch.backend).path:
        ours[KERNEL] = path
    if launch.device == "cpu":
        # One thread per server: the tiny model gains nothing from more, and the threads of two servers would compete for cores.
        ours |= {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", **dict.fromkeys(_THREAD_COUNTS, "1")}
        if launch.cpu_core is not None:
            # SGLang wants one for each rank.
            ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([str(launch.cpu_core)] * _ranks(launch))
    return ours | {name: value for name, value in launch.extra.items() if name not in _EXTENDED}


def _ranks(launch: Launch) -> int:
    """Return the number of processes that share the model, by the flags, or 1 if they are not numbers, which SGLang refuses."""
    values = flag_values((*launch.common, *launch.engine_args))
    given = [next((values[name] for name in names if name in values), "1") for names in _RANK_FLAGS]
    return math.prod(int(value) for value in given) if all(map(str.isdigit, given)) else 1


def kernel_settings(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables by which a process of `ServerProcess` finds a kernel and its compiled code."""
    python_path = [entry for entry in inherited.get("PYTHONPATH", "").split(":") if entry]
    return {
        "PYTHONPATH": ":".join([*python_path, str(Path.cwd())]),  # a kernel given as module:function may be there
        # The default is in the temporary folder, which is private to each process: compiled code would be lost.
        "TORCHINDUCTOR_CACHE_DIR": inherited.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}",
    }


def shell_line(settings: Mapping[str, str], command: Sequence[str]) -> str:
    """Format the launch as a line for a shell, without secrets: it is recorded and shown."""
    variables = [f"{key}={hide(key, value)}" for key, value in settings.items()]
    return shlex.join(["env", *variables, *hide_flags(command)])
