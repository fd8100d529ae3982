"""The jobs of a run's kernel outside of a server, each in a separate process: see `assay.worker`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.declaration import declaration
from assay.harness.attention.forms import feature_in
from assay.harness.attention.matrix import Case, model_cases
from assay.harness.backend import Backend
from assay.harness.checks.check import check
from assay.harness.checks.observed import Reader
from assay.harness.checks.replay import replay, replay_recorded
from assay.harness.errors import UsageError
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.guard import Guard
from assay.harness.localize.raised import raised
from assay.harness.localize.threads import few_threads
from assay.worker import Journal

# Calls of the matrix to repeat, to test whether the kernel is deterministic: each runs three more times.
_REPEATED = 6
# A run gives up without a server if a kernel raises on this many calls of a phase.
_TRIED = 3


def try_first(journal: Journal, candidate: str, matrix: Mapping[str, Any]) -> str:
    """Return the exception that a kernel raised on all of the smallest calls of a phase, or an empty string if it can serve.

    Args:
        journal: receives each call.
        candidate: the kernel's name.
        matrix: the shape of the run's model; see `_cases`.
    """
    guard = Guard(_loaded(journal, candidate), journal=journal)
    with few_threads(()):
        calls = [case.make() for case in _cases(guard.kernel, **matrix)]
    for phase in dict.fromkeys(call.phase for call in calls):
        smallest = sorted((call for call in calls if call.phase == phase), key=lambda call: call.k.shape[0])[:_TRIED]
        with few_threads(smallest):
            said = [why for call in smallest if (why := _raised(guard, call))]
        if len(said) == len(smallest):
            return said[0]
    return ""


def examine(
    journal: Journal, candidate: str, cause: Mapping[str, Any] | None, matrix: Mapping[str, Any] | None, shapes: str
) -> None:
    """Examine the recorded calls of a run, and run the op-level matrix of its model: the events "cause" and "matrix".

    Args:
        journal: receives each call, the result before a read-out, and both results.
        candidate: the kernel's name.
        cause: `pack`, `reproduce` and `served` of `replay_recorded`, or None if that is done. With `kernel`, that kernel computes
            the recorded calls again: the server that recorded them ran the candidate in another environment.
        matrix: the shape of the run's model (see `_cases`), or None if that is done.
        shapes: a description of the common shape of the matrix's calls.
    """
    reader = Reader()
    if cause and cause["kernel"]:
        result = replay(cause["pack"], cause["kernel"], cause["reproduce"], journal=journal)
        journal.write("cause", result=result.model_copy(update={"kernel": candidate}))
    elif cause:
        pack, backend = Path(cause["pack"]), Backend.parse(candidate)
        _loaded(journal, candidate)
        result = replay_recorded(pack, backend, cause["reproduce"], cause["served"], reader=reader, journal=journal)
        journal.write("cause", result=result)
        # An interpreted kernel takes half a minute to read, and another of the same bug would say the same.
        reader = Reader(known={finding.id for finding in result.findings if finding.operator and finding.id in BY_ID})
    if matrix:
        kernel = _loaded(journal, candidate)
        again = f"assay check {candidate} --dtype {matrix['dtype']} --head-dim {matrix['head_dim']}"
        try:
            result = check(
                candidate, cases=_cases(kernel, **matrix), device=matrix["device"], again=again, repeats=_REPEATED,
                read_out=reader, journal=journal,
            )  # fmt: skip
        except UsageError as error:
            result = KernelResult(kernel=candidate, not_run=error.found)
        journal.write("matrix", result=result.model_copy(update={"shapes": shapes}))


def _loaded(journal: Journal, candidate: str) -> Kernel:
    kernel = Backend.parse(candidate).kernel()
    journal.write("loaded")
    return kernel


def _cases(
    kernel: Kernel, device: str, dtype: str, heads: Sequence[int], head_dim: int, tokens: int, asked: Sequence[str] = ()
) -> list[Case]:
    """Make the matrix of a model from its (q heads, kv heads), its longest sequence in tokens, and its layers' requests."""
    q_heads, kv_heads = heads
    declared = declaration(kernel)
    of_model = (q_heads, kv_heads), head_dim, tokens
    asked = [value for value in asked if feature_in(value) in declared.features]
    return model_cases(declared.phases, device, getattr(torch, dtype), *of_model, declared.ways, asked)


def _raised(guard: Guard, call: AttentionCall) -> str:
    """Describe a kernel's exception and the call, phrased to follow "the kernel", or return "" if it answers or refuses."""
    try:
        guard.ask(call, memory=False)
    except KernelRefused:
        return ""
    except Exception as error:
        return f"{raised(error)} on {describe(call)}"
    return ""
