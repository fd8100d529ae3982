"""A model runner without a server: ``python -m assay.harness.engines.vllm.fingerprint_process FLAGS``.

It reads the flags of a server, loads the model in this process as a server's worker does, and prints the fingerprint as JSON on the
last line of its output.
"""

from __future__ import annotations

import os
import sys
import time

from assay.harness.engines.vllm import worker
from assay.harness.engines.vllm.fingerprint import describe
from assay.harness.fingerprint.folder_readings import observed


def _take(flags: list[str]) -> None:
    """Load the model that a server with these flags would serve, print its fingerprint, and end the process."""
    begun = time.monotonic()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: the engine runs in this process
    worker.repair()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
    )
    if (ranks := engine.vllm_config.parallel_config.world_size) > 1:
        sys.exit(f"{ranks} ranks, each in a process of its own: a run observes them in the server")
    made = describe(engine.model_executor.driver_worker.model_runner)
    seconds = {"start": round(time.monotonic() - begun, 2)}
    print("\n" + made.with_parts(observed({}), seconds).model_dump_json(), flush=True)
    os._exit(0)  # otherwise Python would wait for vLLM's threads


if __name__ == "__main__":
    _take(sys.argv[1:])
