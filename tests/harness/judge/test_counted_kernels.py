"""Counted calls -> whether the candidate's own kernel ran, and ran compiled, and what a report lists of them."""

from __future__ import annotations

from typing import Any

from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge import executed_kernels as rules
from assay.harness.judge.call_counts import call_summaries
from assay.harness.sides import ROLES, Role
from assay.harness.statement import state


def count(backend: str, phase: str = "extend", layers: int = 4, delegated_by: str = "", calls: int = 5) -> CallCount:
    return CallCount(
        backend=backend,
        kernel=f"{backend} kernel",
        phase=phase,
        cached_prefix=True,
        delegated_by=delegated_by,
        calls_by_layer=dict.fromkeys(range(layers), calls),
    )


def server(backend: str = "mine", phases: tuple[str, ...] = ("extend",), role: str = "candidate") -> ServerManifest:
    return ServerManifest(role=role, backend=backend, engine="e", claimed_phases=phases, arguments={"dtype": "float32"})


REFERENCE = [count("triton"), count("triton", "decode")]


def test_a_kernel_that_was_never_called_is_missing() -> None:
    (check,) = rules.check_kernel_ran(server(), [], REFERENCE)
    assert (check.status, check.outcome) == ("missing", state("no-call-counted", phase="extend", backend="mine"))


def test_a_fallback_next_to_the_kernel_fails() -> None:
    (check,) = rules.check_kernel_ran(server(), [count("mine"), count("triton", calls=1)], REFERENCE)
    assert (check.status, check.outcome.id, check.outcome.values["others"]) == ("failed", "others-called", [["triton kernel", 4]])


def test_a_layer_without_the_kernel_fails() -> None:
    (check,) = rules.check_kernel_ran(server(), [count("mine", layers=3)], REFERENCE)
    found = state("layers-lacking", kernel="mine kernel", ran=3, layers=4, lacking=[3])
    assert (check.status, check.outcome) == ("failed", found)


def test_a_server_that_assay_did_not_start_proves_nothing() -> None:
    for of, found in ((server("http://x", ()), "not-instrumented"), (None, "candidate-never-started")):
        (check,) = rules.check_kernel_ran(of, [], [])
        assert (check.status, check.outcome.id) == ("missing", found)


def decode_calls(calls: int, compiled: bool) -> CallCount:
    return CallCount(
        backend="triton", kernel="triton", phase="decode", cached_prefix=True, compiled=compiled, calls_by_layer={0: calls}
    )


def test_compiled_only_where_it_was_asked_for() -> None:
    counts: dict[Role, list[CallCount]] = {role: [decode_calls(9, False)] for role in ROLES}
    plain = {role: server("triton", role=role) for role in ROLES}
    assert rules.check_compiled(plain, counts) == []
    asked = {role: one.model_copy(update={"arguments": {"enable_torch_compile": True}}) for role, one in plain.items()}
    (check,) = rules.check_compiled(asked, counts)
    assert check.status == "missing"
    counts["reference"].append(decode_calls(10, True))
    (check,) = rules.check_compiled(asked, counts)
    assert check.status == "missing", "the candidate's were not compiled"
    counts["candidate"].append(decode_calls(9, True))
    (check,) = rules.check_compiled(asked, counts)
    assert check.status == "missing", "half of the candidate's were not: as many as capturing alone may leave"
    counts["candidate"].append(decode_calls(82, True))
    (check,) = rules.check_compiled(asked, counts)
    shares = [("reference", 10, 19), ("candidate", 91, 100)]
    assert (check.status, check.outcome) == ("ok", state("decode-calls", shares=shares, least=0.5))


def test_ways_of_calling_one_kernel_are_added_up() -> None:
    def ways(calls: int, **kind: Any) -> CallCount:
        return count("triton", "decode", 2, calls=calls).model_copy(update={"kernel": "triton"} | kind)

    counts = [ways(3, captured=True, compiled=True), ways(4, compiled=True), ways(5), ways(6, phase="extend", cached_prefix=False)]
    extend, decode = call_summaries(counts)
    assert (extend.calls, extend.calls_with_cached_prefix, extend.layers) == (12, 0, 2)
    assert (decode.calls, decode.calls_in_graphs, decode.calls_compiled) == (24, 6, 14)
