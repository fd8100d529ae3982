"""The launch of a server, whatever its engine: `Launch`, and what the command lines and environments of all engines share.

`launching` finds each engine's own command line and environment.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from assay.harness.backend import Backend
from assay.harness.engines import registry
from assay.harness.engines.environments import python_path
from assay.harness.engines.inside.control import DELEGATE, EVIDENCE, KERNEL
from assay.harness.errors import EngineError, UsageError
from assay.harness.sides import Device, Engine, Role, hide, hide_flags, profile_of

HOST = "127.0.0.1"
"""The address on which servers listen."""
# Environment variables that assay extends, whoever sets them.
_EXTENDED = ("PYTHONPATH", "no_proxy", "NO_PROXY")
_RESOLVING_TIMEOUT_S = 300.0
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Launch:
    """Everything that decides how a server is launched, except its port and name.

    Attributes:
        role: which side of the comparison it is.
        backend: name of an attention backend that the engine knows, or a kernel as ``module:function``.
        model: folder of the model.
        device: "cpu" or "cuda".
        evidence: folder for the files that the server's process writes; also its working directory.
        log: file that the server's output is appended to.
        decode_backend: the native backend to which a kernel without a decode phase delegates decode calls.
        startup_timeout: seconds until it must be ready.
        request_timeout: seconds until an answer must be complete.
        engine_args: the user's flags; they come last, so they override assay's.
        common: flags that both servers get because one of the backends forces them (`assay.harness.engines.sglang.common`).
        cpu_core: the core that a CPU server computes on; by default the engine chooses.
        eager: no CUDA graphs. Must be the same for both servers, and True if either backend cannot be captured.
        extra: further environment variables: the side's, and ASSAY_SHADOW, ... (see `assay.harness.engines.inside.control`).
        interpreter: Python that starts the server, by default the one that runs assay.
        engine: the engine that is launched.
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
    engine: Engine = "sglang"

    def __post_init__(self) -> None:
        check_engine_args(self.engine, self.engine_args)


class Launching(Protocol):
    """``launch``: the command line and the environment of a server."""

    CHUNK_FLAG: str
    """The flag for the most tokens that are prefilled at once."""

    def command(self, launch: Launch, port: int, name: str, /) -> list[str]:
        """Return the command line; ``name`` is the model name that the server answers to."""

    def settings(self, launch: Launch, inherited: Mapping[str, str], /) -> dict[str, str]:
        """Return the environment variables that assay sets, in addition to those ``inherited``."""


def launching(engine: Engine) -> Launching:
    """Return the module with the command line of an engine's server."""
    return cast(Launching, registry.module(engine, "launch"))


def check_engine_args(engine: Engine, engine_args: Sequence[str]) -> None:
    """Refuse flags that assay sets itself, and words that are neither a flag nor a flag's value.

    Raises:
        UsageError: one of them sets one of the engine's `EngineProfile.own_flags`, or is not a flag.
    """
    profile = profile_of(engine)
    for before, given in zip(("", *engine_args), engine_args, strict=False):
        if not given.startswith("-") and (not before.startswith("--") or "=" in before):
            raise UsageError(
                f"--engine-arg={given} is not a flag.",
                f"a flag of {profile.title}, which begins with --, or a value right after its flag",
                f"give --engine-arg=--FLAG, as in --engine-arg={profile.example_flag}",
            )
        flag = given.partition("=")[0]
        # argparse accepts any unambiguous prefix of a flag
        own = next(
            (own for own in profile.own_flags if flag.startswith("--") and len(flag) > 2 and own.startswith(flag)), None
        )
        if own:
            raise UsageError(
                f"--engine-arg={hide_flags([given])[0]} sets {own}, which assay sets itself.",
                "a flag for both servers that assay does not set",
                "use assay's own --reference, --candidate, --model or --device, or remove it",
            )


def common_settings(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that assay sets for a server of any engine, in addition to those ``inherited``.

    Variables of a side replace inherited ones. Assay's own folders and addresses are added to either.
    """
    inherited = {**inherited, **launch.extra}
    settings = kernel_settings(inherited)
    if launch.interpreter:  # its environment may have no assay, or another one
        settings["PYTHONPATH"] = python_path(launch.interpreter, settings["PYTHONPATH"])
    no_proxy = ",".join(filter(None, [inherited.get("no_proxy") or inherited.get("NO_PROXY"), HOST, "localhost"]))
    ours = {
        **settings,
        EVIDENCE: str(launch.evidence.resolve()),
        DELEGATE: launch.decode_backend,
        "HF_HUB_OFFLINE": "1",
        # An engine's own warm-up request goes over the loopback address too.
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
    }
    if path := Backend.parse(launch.backend).path:
        ours[KERNEL] = path
    if launch.device == "cpu":
        # One thread per server: the tiny model gains nothing from more, and the threads of two servers would compete for cores.
        ours |= {"TRITON_INTERPRET": "1", **dict.fromkeys(_THREAD_COUNTS, "1")}
    return ours


def resolved(launch: Launch, module: str) -> dict[str, Any]:
    """Resolve a launch's command line with the engine's own parser, in a process that starts no server.

    Args:
        module: prints the arguments as JSON on the last line of its output, given the server's flags (``python -m``).

    Raises:
        EngineError: the engine refuses the command line, or does not answer in time.
    """
    own = launching(launch.engine)
    argv = own.command(launch, 1, "assay")
    argv[argv.index("-m") + 1] = module
    environment = {**os.environ, **own.settings(launch, os.environ)}
    try:
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=_RESOLVING_TIMEOUT_S, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
        arguments: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return arguments
    except (subprocess.TimeoutExpired, OSError, IndexError, ValueError) as error:
        last = [str(error)]
        if isinstance(error, (IndexError, ValueError)):
            said = done.stderr.strip().splitlines()
            raised = [at for at, line in enumerate(said) if line.partition(":")[0].endswith("Error")]
            last = said[raised[-1] :] if raised else said[-1:]
        title = profile_of(launch.engine).title
        raise EngineError(
            f"{title} does not resolve the command line of the {launch.role} ({launch.backend}): {' '.join(last)}.",
            f"flags that this version of {title} has, with values that it accepts",
            f"correct --engine-arg, --{launch.role}-arg or --{launch.role}-with",
        ) from None


def with_extra(launch: Launch, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server with the side's own, which replace assay's but for those that assay extends."""
    return {**ours, **{name: value for name, value in launch.extra.items() if name not in _EXTENDED}}


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
