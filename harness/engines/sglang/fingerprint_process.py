"""A model runner without a server: ``python -m assay.harness.engines.sglang.fingerprint_process FLAGS``.

It reads the flags of a server, loads the model as a server's schedulers do, in a process for each rank, takes the fingerprint, and
prints it as JSON on the last line of its output. SGLang's own one-batch benchmark makes the runners, so that none of it is rebuilt
here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.harness.engines.sglang.fingerprint import describe, resolved_arguments
from assay.harness.evidence.fingerprint import OF_PROCESS
from assay.harness.fingerprint.folder_readings import observed
from assay.harness.fingerprint.weights import joined
from assay.harness.sides import flag_values

# SGLang's variable: model files that it does not import.
_DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"
# Signal from a failed rank to the process that waits for all.
_FAILED = signal.SIGUSR1
# Tokens of the prefill whose position ids are observed.
_POSITIONS = 12


def _take(flags: list[str]) -> None:
    """Load the model that a server with these flags would serve, print its fingerprint, and end the process."""
    begun = time.monotonic()
    _import_only(flags)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(flags)
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    server_args.check_server_args()  # as a server does: it resolves, too, and enables LoRA where adapters are named
    resolved = resolved_arguments(server_args)  # the benchmark then sets some for itself
    bench, _ = _bench()
    signal.signal(_FAILED, _end)
    with tempfile.TemporaryDirectory(prefix="assay-ranks-") as folder:
        bench.latency_test = partial(_in_rank, Path(folder), begun)  # the function that the benchmark runs in each rank
        bench.main(server_args, bench.BenchArgs())
        written = list(OF_PROCESS.read_each(Path(folder)).values())
    if len(written) < server_args.tp_size:
        sys.exit(f"{len(written)} of {server_args.tp_size} ranks loaded the model")
    print("\n" + joined(written).model_copy(update={"arguments": resolved}).model_dump_json(), flush=True)
    os._exit(0)  # otherwise Python would wait for SGLang's threads


def _in_rank(
    folder: Path, begun: float, server_args: Any, port_args: Any, bench_args: Any, gpu: int, rank: int
) -> None:
    """Load the model as a rank, and write its fingerprint into a folder; then end the process, if it is the rank's own."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    bench, measure = _bench()
    load = bench.load_model

    def loaded(*args: Any, **kwargs: Any) -> None:
        built, _ = load(*args, **kwargs)
        seconds = {"start": round(time.monotonic() - begun, 2)}
        runner = getattr(built, "torch_runner", built)
        made = describe(runner).with_parts(observed({"positions": lambda: _positions(bench, built, runner)}), seconds)
        OF_PROCESS.write(folder, made, process=f"{rank:04}")
        if multiprocessing.parent_process() is not None:
            os._exit(0)
        raise _ObservedError

    bench.load_model = loaded
    try:
        measure(server_args, port_args, bench_args, gpu, rank)
    except _ObservedError:
        return
    except BaseException:
        if multiprocessing.parent_process() is None:
            raise
        traceback.print_exc()
        os.kill(os.getppid(), _FAILED)
        os._exit(1)


def _end(number: int, frame: object) -> None:
    """End all ranks once one has failed, because the others would wait for it."""
    for rank in multiprocessing.active_children():
        rank.kill()
    sys.exit("a rank failed")


class _ObservedError(Exception):
    """Ends the benchmark once the model is loaded: nothing is measured."""


def _import_only(flags: list[str]) -> None:
    """Have SGLang import only the file of this model's architecture: importing all takes two thirds of its start."""
    package = find_spec("sglang")
    path = Path(flag_values(tuple(flags)).get("--model-path", "")) / "config.json"
    if _DISABLED in os.environ or package is None or not package.submodule_search_locations or not path.is_file():
        return
    names = json.loads(path.read_text()).get("architectures") or []
    files = sorted((Path(next(iter(package.submodule_search_locations))) / "srt" / "models").glob("*.py"))
    needed = {
        file.stem for file in files if any(f"class {name}(" in file.read_text(errors="replace") for name in names)
    }
    if needed:
        others = {file.stem for file in files} - needed - {"registry", "utils", "__init__"}
        os.environ[_DISABLED] = ",".join(sorted(others))


@cache
def _bench() -> tuple[Any, Any]:
    """Return SGLang's benchmark, and its function that measures in one rank."""
    try:
        bench = import_module("sglang.benchmark.one_batch")
    except ModuleNotFoundError:  # in older versions
        bench = import_module("sglang.bench_one_batch")
    return bench, bench.latency_test


def _positions(bench: Any, built: Any, runner: Any) -> tuple[int, ...]:
    """Prefill a few tokens, and return the position ids that the model gets."""
    seen: list[Any] = []
    forward = runner.forward

    def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(forward_batch.positions)
        return forward(forward_batch, *args, **kwargs)

    runner.forward = watched
    try:
        requests = bench.prepare_synthetic_inputs_for_latency_test(1, _POSITIONS)
        for request in requests:  # its random ids may lie beyond a small vocabulary
            for ids in (request.origin_input_ids, getattr(request, "fill_ids", None) or []):
                for place in range(len(ids)):
                    ids[place] = 1
        built.extend(requests) if hasattr(built, "extend") else bench.extend(requests, runner)
    finally:
        runner.forward = forward
    return tuple(int(position) for position in seen[0].flatten()[:_POSITIONS].tolist())


if __name__ == "__main__":
    _take(sys.argv[1:])
