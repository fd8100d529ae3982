"""Faults of the scheduler, seeded in real servers: does ``assay invariance`` find each, and the features that carry it?

    python benchmarks/invariance_faults.py [--device cpu] [--model tiny] [--faults stale-length,swapped-rows] [--honest 1]

Every server of an invocation has the same fault, the base's included. Beside the features that carry it, others are switched that
do not. By default those faults are seeded whose features the device has, those of layers that keep states in a model that has some
(``--model hybrid``). Prints one table: seeded, found, reduced to the right set, where in the model it shows, minutes; then honest
servers, which must be clean.
``--reverted`` seeds historical bugs of SGLang in place of these (``SGLANG_DEBUG_REVERT_PR``). ``--repaired`` runs the honest
servers with a copy of SGLang 0.5.23 in which its issue 36938 is repaired: without that, retracted requests shift the
log-probabilities of others' prompts, and no default array on a CPU is clean.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import hybrid_model, python_path, random_model
from rich.console import Console
from rich.table import Table

from assay.harness.config import RunSpec
from assay.harness.engines.sglang.features import features_of
from assay.harness.engines.sglang.scheduler_faults import FAULT, FAULTS, SchedulerFault
from assay.harness.errors import AssayError
from assay.harness.judge.invariance_parting import place_of
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.progress import ProgressDisplay
from assay.harness.run import compare_features
from assay.harness.sides import Device, Side

BESIDE = ("prefix-cache", "batch", "order", "streamed")
"""Features that are switched whatever the fault, if no others are named: they take no further server."""
REVERTED: Mapping[str, tuple[str, Sequence[str]]] = {
    "25015": ("", ("draft-model",)),
    "26329": ("", ("draft-model", "chunked-prefill")),
    "27360": ("fa3", ("draft-model", "cuda-graph-decode")),
}
"""Pull requests that SGLang 0.5.17 and 0.5.23 can revert -> attention backend, if another than the base's has what they fixed, and
features that carry it. All need a draft model, and so a GPU. Reverts of others do not apply (27338, 27460), or need drafts that are
trees in pages (26972)."""
HYBRID = "hybrid"
"""Names a model whose layers keep states."""
MADE = {HYBRID: hybrid_model, "1b": random_model}
"""Models that are made here, by name."""
CONSOLE = Console(width=160)
_RESULTS = "srt/managers/scheduler_components/batch_result_processor.py"
_SKIPPED = """                    # drain its accounting without streaming it.
                    continue
"""
_COUNTED = """                    # drain its accounting without streaming it.
                    if batch.return_logprob:
                        logprob_pt = self._apply_prefill_logprobs(
                            req=req, i=i, logits_output=logits_output, next_token_ids=next_token_ids, logprob_pt=logprob_pt,
                            extend_input_len_per_req=extend_input_len_per_req,
                            extend_logprob_start_len_per_req=extend_logprob_start_len_per_req, store=False,
                        )
                    continue
"""
"""What SGLang's pull request 36939 does: the flat list of log-probabilities has those of skipped requests, too."""


def seedable(fault: type[SchedulerFault], device: Device) -> bool:
    """Return True if a device has the features that carry a fault, and runs a model whose layers it touches."""
    known = features_of(device)
    return (device == "cuda" or not fault.recurrent) and all(device in known[id_].devices for id_ in fault.carriers[0])


def compared(device: str, side: Side, features: Sequence[str], out: Path) -> InvarianceResult:
    """Switch features in servers of a side."""
    if make := MADE.get(side.model):
        side = side.model_copy(update={"model": str(make(out.with_name(side.model)))})
    spec = RunSpec.of(device=device, reference=side, candidate=side)
    return compare_features(spec, out, features=features, display=ProgressDisplay(Console(stderr=True), 30.0))


def repaired(folder: Path) -> Path:
    """Copy SGLang by links, with the results of prefill batches repaired; return the folder to import it from.

    Raises:
        SystemExit: this version does not have the lines that are repaired.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    source = (package / _RESULTS).read_text()
    if source.count(_SKIPPED) != 1:
        raise SystemExit(f"{package / _RESULTS} is not that of SGLang 0.5.23: leave --repaired out")
    shutil.copytree(package, folder / package.name, copy_function=os.symlink)
    (folder / package.name / _RESULTS).unlink()
    (folder / package.name / _RESULTS).write_text(source.replace(_SKIPPED, _COUNTED))
    return folder


def reduced(result: InvarianceResult, carriers: Sequence[frozenset[str]]) -> tuple[str, bool]:
    """Return the sets of features that were found, and whether each is one that carries the fault."""
    found = [finding.title.removesuffix(" changes the output") for finding in result.findings]
    right = bool(found) and all(frozenset(names.split(" + ")) in carriers for names in found)
    return "; ".join(found), right


def main() -> int:
    """Print the table. Returns 1 if a fault is not found, or an honest server is not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--model",
        default="tiny",
        help=f"made here: {HYBRID}, whose layers keep states, and 1b, random weights of that shape",
    )
    parser.add_argument("--backend", default="")
    parser.add_argument("--engine-arg", action="append", default=[], help="flag of every server; may be repeated")
    parser.add_argument("--faults", default="", help="by default all whose features the device has; none: no fault")
    parser.add_argument("--beside", default=",".join(BESIDE), help="features that are switched whatever the fault")
    parser.add_argument("--reverted", action="store_true")
    parser.add_argument("--honest", type=int, default=1, help="invocations without a fault")
    parser.add_argument("--features", default="", help="that these switch; by default all")
    parser.add_argument("--repaired", action="store_true", help="these run SGLang with its issue 36938 repaired")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    backend = given.backend or {"cpu": "torch_native", "cuda": "triton"}[given.device]
    beside = tuple(filter(None, given.beside.split(",")))
    faults = [name for name, fault in FAULTS.items() if seedable(fault, given.device)]
    faults = [] if given.faults == "none" else list(filter(None, given.faults.split(","))) or faults
    if unknown := [name for name in faults if name not in FAULTS]:
        parser.error(f"{unknown[0]} is no fault: {', '.join(FAULTS)}")
    place = given.out or Path(tempfile.mkdtemp(prefix="invariance-"))
    table = Table(
        "seeded",
        "carried by",
        "found",
        "verdict",
        "reduced to the right set",
        "where in the model",
        "servers",
        "arms",
        "minutes",
    )
    missed = 0

    def row(seeded: str, features: Sequence[str], carriers: Sequence[frozenset[str]], side: Side) -> None:
        nonlocal missed
        begun = time.monotonic()
        carried = " or ".join(" + ".join(sorted(each)) for each in carriers[:1]) + (
            " or …" if len(carriers) > 1 else ""
        )
        try:
            result = compared(given.device, side, features, place / seeded)
        except AssayError as error:
            missed += 1
            table.add_row(seeded, carried, f"[no result: {error.found[:60]}]", "error", "no", "", "", "", "")
            return
        found, right = reduced(result, carriers)
        missed += result.verdict != "regression"
        minutes = f"{(time.monotonic() - begun) / 60:.1f}"
        counts = (f"{result.servers}", f"{len(result.arms)}")
        placed = "; ".join(place_of(parting) or f"not observed: {parting.not_observed}" for parting in result.partings)
        cells = (
            seeded,
            carried,
            found or "nothing",
            result.verdict,
            "yes" if right else "no",
            placed,
            *counts,
            minutes,
        )
        table.add_row(*cells)
        print(*cells, sep="; ", file=sys.stderr, flush=True)  # a long table is not lost if it is ended early

    own = Side(backend=backend, model=given.model, flags=tuple(given.engine_arg))
    if given.reverted:
        for number, (other, carriers) in REVERTED.items():
            features = tuple(dict.fromkeys((*carriers, *beside)))
            side = {"backend": other or backend, "environment": {"SGLANG_DEBUG_REVERT_PR": number}}
            row(f"PR {number}", features, [frozenset(carriers)], own.model_copy(update=side))
    else:
        for name in faults:
            fault = FAULTS[name]
            features = tuple(dict.fromkeys((*sorted(fault.carriers[0]), *beside)))
            side = {"model": HYBRID if fault.recurrent else given.model, "environment": {FAULT: name}}
            row(name, features, fault.carriers, own.model_copy(update=side))
    if faults:
        CONSOLE.print(table)
    servers = arms = clean = 0
    begun, honest = time.monotonic(), tuple(filter(None, given.features.split(",")))
    if given.repaired:
        path = python_path(repaired(place / "repaired"))
        own = own.model_copy(update={"environment": {"PYTHONPATH": path}})
    for turn in range(given.honest):
        result = compared(given.device, own, honest, place / f"honest-{turn}")
        for arm in result.arms:
            if arm.verdict != "pass":
                CONSOLE.print(f"honest-{turn}: {' + '.join(arm.features) or 'base'}: {arm.verdict}: {arm.why}")
        failing = {arm.server for arm in result.arms if arm.verdict != "pass"}
        started = {arm.server for arm in result.arms}
        servers, arms, clean = servers + len(started), arms + len(result.arms), clean + len(started - failing)
    if given.honest:
        CONSOLE.print(
            f"honest: {clean} of {servers} servers clean, in {arms} arms of {given.honest} invocations; "
            f"{(time.monotonic() - begun) / 60:.1f} minutes"
        )
    load = os.getloadavg()[0]
    CONSOLE.print(f"load of this machine at the end: {load:.1f} on {os.cpu_count()} cores; evidence in {place}")
    return int(bool(missed) or clean < servers)


if __name__ == "__main__":
    sys.exit(main())
