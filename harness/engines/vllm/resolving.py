"""What vLLM resolves a command line to, without a server: ``python -m assay.harness.engines.vllm.resolving FLAGS``.

The arguments are printed as JSON on the last line, in the form of ``/server_info``; the size of the cache in blocks is known only
to a running server.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


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
