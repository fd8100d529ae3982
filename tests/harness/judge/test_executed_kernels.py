from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from assay.harness.evidence.executed import ExecutedKernel, KernelKind, KernelTrace, TracedPass
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.executed_kernels import _MAX_NAME, _check_kernels_executed, listed_passes
from assay.harness.sides import Role
from assay.harness.statement import state
from assay.harness.verdict import Check

SAGE = {"noise": "int8_qk", "kernels": ("^_attn_fwd$", "quant_per_block")}
RAN = ("_attn_fwd", "quant_per_block_int8_kernel")
SDPA = ("aten::scaled_dot_product_attention",)
TRITON = ("_fwd_kernel", "_fwd_grouped_kernel_stage1")
EXTEND, CACHED, DECODE = ("extend", False), ("extend", True), ("decode", True)


def traced(
    *passes: tuple[tuple[str, bool], Sequence[str]],
    backend: str = "mine",
    claim: Mapping[str, Any] = SAGE,
    kind: KernelKind = "device",
    attention: bool | None = True,
) -> KernelTrace:
    made = [
        TracedPass(
            phase=phase,
            cached_prefix=cached,
            kernels=tuple(
                ExecutedKernel(kind="operator" if name.startswith("aten") else kind, name=name, attention=attention, launches=4)
                for name in names
            ),
        )
        for (phase, cached), names in passes
    ]
    return KernelTrace(backend=backend, passes=tuple(made), **claim)


def reference(*names: str, backend: str = "triton", claim: Mapping[str, Any] | None = None) -> KernelTrace:
    passes = [(kind, names or TRITON) for kind in (EXTEND, CACHED, DECODE)]
    return traced(*passes, backend=backend, claim=claim or {})


def checked(
    candidate: KernelTrace | None, other: KernelTrace | None = None, phases: tuple[str, ...] = ("extend",), stored: bool = False
) -> list[Check]:
    server = ServerManifest(role="candidate", backend="mine", engine="e", claimed_phases=phases)
    traces: dict[Role, list[KernelTrace]] = {
        "candidate": [candidate] if candidate else [],
        "reference": [] if stored else [other or reference()],
    }
    return _check_kernels_executed(server, traces, stored)


def status(candidate: KernelTrace | None, other: KernelTrace | None = None, **more: object) -> str:
    (check,) = checked(candidate, other, **more)  # type: ignore[arg-type]
    return check.status


def test_declared_kernels_in_every_traced_pass_are_ok() -> None:
    (check,) = checked(traced((EXTEND, RAN), (CACHED, RAN)))
    assert (check.id, check.status) == ("kernel-executed-extend", "ok")
    assert check.outcome == state("kernels-ran", ran=[("_attn_fwd", 8), ("quant_per_block_int8_kernel", 8)])


def test_a_declared_kernel_may_belong_to_one_of_two_claimed_phases() -> None:
    both = {"kernels": ("prefill_kernel", "decode_kernel")}
    trace = traced((EXTEND, ("prefill_kernel",)), (DECODE, ("decode_kernel",)), claim=both)
    assert [one.status for one in checked(trace, phases=("extend", "decode"))] == ["ok", "ok"]
    trace = traced((EXTEND, ("prefill_kernel",)), (DECODE, ("prefill_kernel",)), claim=both)
    unseen = checked(trace, phases=("extend", "decode"))
    assert [one.status for one in unseen] == ["failed", "failed"]
    assert [one.outcome.values["names"] for one in unseen if one.outcome.id == "declared-never-ran"] == [["decode_kernel"]] * 2


def test_the_references_kernel_in_the_candidates_attention_fails() -> None:
    (check,) = checked(traced((EXTEND, (*RAN, "_fwd_kernel"))))
    found = state("reference-kernels-ran", phase="extend", backend="mine", names=["_fwd_kernel"])
    assert (check.status, check.outcome) == ("failed", found)


def test_the_references_kernel_outside_of_attention_is_ignored() -> None:
    trace = traced((EXTEND, (*RAN, "_fwd_kernel")))
    (one,) = trace.passes
    elsewhere = one.kernels[-1].model_copy(update={"attention": False})
    assert (
        status(trace.model_copy(update={"passes": (one.model_copy(update={"kernels": (*one.kernels[:-1], elsewhere)}),)})) == "ok"
    )


def test_the_candidates_kernels_in_the_reference_fail() -> None:
    (check,) = checked(traced((EXTEND, RAN)), reference(*TRITON, "_attn_fwd"))
    assert (check.status, check.outcome) == ("failed", state("reference-ran-candidates", names=["_attn_fwd"]))


def test_two_kernels_of_the_same_package_may_launch_the_same() -> None:
    assert status(traced((EXTEND, RAN)), reference(*RAN, backend="yours", claim=SAGE)) == "ok"


def test_one_of_the_packages_triton_functions_proves_a_kernel_without_declared_names() -> None:
    package = {"package": "sageattention", "in_package": ("_attn_fwd", "unused")}
    assert status(traced((EXTEND, RAN), claim=package)) == "ok"
    assert status(traced((EXTEND, SDPA), claim=package)) == "failed"
    assert status(traced((EXTEND, ("other_attn_fwd",)), claim=package)) == "failed", "names are compared whole"


@pytest.mark.parametrize("claim", [{"noise": "int8_qk"}, {"package": "compiled"}])
def test_a_claim_without_names_is_missing_and_says_what_ran(claim: Mapping[str, Any]) -> None:
    (check,) = checked(traced((EXTEND, RAN), claim=claim))
    ran = [("_attn_fwd", 4), ("quant_per_block_int8_kernel", 4)]
    claims = {"noise": "", "package": ""} | dict(claim)
    assert (check.status, check.outcome) == ("missing", state("kernels-not-named", **claims, ran=ran))


def test_a_phase_that_was_not_traced_is_missing() -> None:
    assert status(None) == "missing"
    assert status(traced((DECODE, RAN))) == "missing"
    assert status(traced((EXTEND, RAN)), traced((DECODE, TRITON), backend="triton", claim={})) == "missing"
    assert status(traced((EXTEND, RAN)), stored=True) == "ok"


def test_each_process_of_a_server_must_run_it() -> None:
    traces: dict[Role, list[KernelTrace]] = {
        "candidate": [traced((EXTEND, RAN)), traced((EXTEND, SDPA))],
        "reference": [reference()],
    }
    server = ServerManifest(role="candidate", backend="mine", engine="e", claimed_phases=("extend",))
    (check,) = _check_kernels_executed(server, traces)
    assert check.status == "failed"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("triton", "_fwd_kernel"),
        ("triton", "_fwd_grouped_kernel_stage1"),
        ("triton", "_fwd_kernel_unified"),
        ("torch_native", "aten::scaled_dot_product_attention"),
        ("flex_attention", "triton_tem_fused_flex_attention_0"),
        ("fa3", "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"),
        ("flashinfer", "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>"),
    ],
)  # fmt: skip
def test_kernels_of_sglangs_own_backends_are_known(backend: str, name: str) -> None:
    other = reference("something_else", backend="another")
    assert status(traced((EXTEND, (name,)), backend=backend, claim={}), other) == "ok"
    unknown = traced((EXTEND, ("renamed",)), backend=backend, claim={})
    assert status(unknown, other) == "not checked"


def test_a_report_lists_kernels_by_role_and_shortens_names() -> None:
    long = "void " + "x" * 500
    passes = listed_passes({"candidate": [traced((EXTEND, (*RAN, *SDPA, "aten::mul", long)))], "reference": [reference()]})
    rows = {row.name: row.of for one in passes if one.role == "candidate" for row in one.kernels}
    assert rows == {"_attn_fwd": "candidate", "quant_per_block_int8_kernel": "candidate", long[:_MAX_NAME]: ""}
    assert {row.of for one in passes if one.role == "reference" for row in one.kernels} == {"reference"}
