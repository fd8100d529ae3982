"""What vLLM resolves a command line to, without a server: ``python -m assay.harness.engines.vllm.resolving FLAGS``.

The arguments are printed as JSON on the last line, in the form of ``/server_info``; the size of the cache in blocks is known only
to a running server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from assay.harness.engines.launch import Launch
from assay.harness.engines.vllm import launch as launching
from assay.harness.engines.vllm.arguments import settled
from assay.harness.errors import EngineError

_MODULE = "assay.harness.engines.vllm.resolving"
_TIMEOUT_S = 300.0


def resolved_arguments(launch: Launch) -> dict[str, Any]:
    """Resolve a launch's command line with vLLM's own parser, in a process that starts no server.

    Raises:
        EngineError: it refuses the command line, or does not answer in time.
    """
    argv = launching.command(launch, 1, "assay")
    argv[argv.index("-m") + 1] = _MODULE
    environment = {**os.environ, **launching.settings(launch, os.environ)}
    try:
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )  # fmt: skip
        return settled(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, OSError) as error:
        last = str(error)
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        last = next((line for line in reversed(said) if "rror" in line.partition(":")[0]), "".join(said[-1:]))
    raise EngineError(
        f"vLLM does not resolve the command line of the {launch.role} ({launch.backend}): {last}",
        "flags that this version of vLLM has, with values that it accepts",
        f"correct --engine-arg, --{launch.role}-arg or --{launch.role}-with",
    )


def _resolved(flags: list[str]) -> Any:
    """Resolve the arguments of a server with these flags, by section."""
    from pydantic import TypeAdapter
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    return TypeAdapter(VllmConfig).dump_python(config, mode="json", fallback=str)


if __name__ == "__main__":
    print("\n" + json.dumps(_resolved(sys.argv[1:])), flush=True)
    os._exit(0)
