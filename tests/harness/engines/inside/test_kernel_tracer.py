"""The list of a pass's kernels, on a stand-in for SGLang's model runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.harness.attention import kernels
from assay.harness.attention.declaration import declaration
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.engines.inside.kernel_tracer import KernelTracer, _kernels_in, _triton_functions, kernel_tracer
from assay.harness.engines.sglang.meter import watch
from assay.harness.evidence.executed import KERNEL_TRACES, KernelTrace, passes_of

pytestmark = pytest.mark.sglang
CALL = call_of([(20, 0)], heads=(2, 2), head_dim=64, dtype=torch.float16, device="cpu")


def batch(phase: str, prefix: int = 0, rids: tuple[str, ...] = ("a",)) -> Any:
    mode = SimpleNamespace(is_decode=lambda: phase == "decode", is_extend=lambda: phase == "extend")
    return SimpleNamespace(rids=list(rids), forward_mode=mode, extend_prefix_lens_cpu=[prefix])


class Runner:
    """Stand-in for SGLang's ModelRunner, whose passes multiply two matrices and call attention once."""

    def __init__(self, attend: Callable[[], Any]) -> None:
        self.attend: Callable[[], Any] = attend

    def forward(self, forward_batch: Any, scale: float = 1.0) -> float:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        self.attend()
        return scale


def watched(folder: Path, kernel: Any) -> tuple[Runner, KernelTracer]:
    tracer = kernel_tracer(folder)

    def attend() -> None:
        if tracer.on:
            with tracer.attention():
                kernel(CALL)

    runner = Runner(attend)
    backend = SimpleNamespace(assay_declared=declaration(kernel))
    watch(runner, "mine", backend, folder)
    watch(runner, "mine", backend, folder)
    return runner, tracer


def traced(folder: Path) -> KernelTrace:
    (trace,) = KERNEL_TRACES.read_each(folder).values()
    return trace


def names(trace: KernelTrace, phase: str = "extend") -> set[str]:
    return {kernel.name for one in passes_of([trace], phase) for kernel in one.kernels}


def test_operators_inside_of_attention_are_listed_and_no_others(tmp_path: Path) -> None:
    runner, tracer = watched(tmp_path, torch_sdpa)
    assert runner.forward(batch("extend"), scale=3.0) == 3.0
    assert KERNEL_TRACES.read_each(tmp_path) == {}, "the control does not ask"
    set_control(tmp_path, Control(profile="p"))
    assert runner.forward(batch("extend"), scale=3.0) == 3.0
    assert not tracer.on
    listed = names(traced(tmp_path))
    assert "aten::scaled_dot_product_attention" in listed
    assert "aten::mm" not in listed
    assert traced(tmp_path).backend == "mine"


def test_one_pass_of_each_kind_is_traced_under_a_label(tmp_path: Path) -> None:
    runner, _ = watched(tmp_path, torch_sdpa)
    set_control(tmp_path, Control(profile="p"))
    for _ in range(2):
        runner.forward(batch("extend"))
        runner.forward(batch("extend", prefix=16))
        runner.forward(batch("decode"))
        runner.forward(batch("idle"))
        runner.forward(batch("extend", rids=()))  # SGLang's own
    kinds = [("extend", False), ("extend", True), ("decode", True)]
    assert [(one.phase, one.cached_prefix) for one in traced(tmp_path).passes] == kinds
    set_control(tmp_path, Control(profile="q"))
    runner.forward(batch("decode"))
    assert len(traced(tmp_path).passes) == 4


@pytest.mark.interpreter
def test_interpreted_triton_functions_are_listed_with_their_module(tmp_path: Path) -> None:
    sage = kernels.load("sage_attn")
    runner, _ = watched(tmp_path, sage)
    set_control(tmp_path, Control(profile="p"))
    runner.forward(batch("extend"))
    trace = traced(tmp_path)
    triton = {(k.name, k.module.partition(".")[0]): k.launches for k in trace.passes[0].kernels if k.kind == "triton"}
    assert triton == {("_attn_fwd", "sageattention"): 1, ("quant_per_block_int8_kernel", "sageattention"): 2}
    assert all(k.attention for k in trace.passes[0].kernels)
    assert trace.kernels == declaration(sage).kernels
    assert {"_attn_fwd", "quant_per_block_int8_kernel"} <= set(trace.in_package)


@pytest.mark.interpreter
def test_the_interpreter_is_as_it_was_after_a_trace(tmp_path: Path) -> None:
    from triton.runtime.interpreter import GridExecutor

    before = GridExecutor.__call__

    def fails(call: Any) -> None:
        raise RuntimeError("kernel failed")

    runner, tracer = watched(tmp_path, fails)
    set_control(tmp_path, Control(profile="p"))
    with pytest.raises(RuntimeError, match="kernel failed"):
        runner.forward(batch("extend"))
    assert GridExecutor.__call__ is before
    assert not tracer.on
    assert KERNEL_TRACES.read_each(tmp_path) == {}


def test_a_package_without_triton_functions_defines_none() -> None:
    assert _triton_functions("") == ()
    assert _triton_functions("numpy") == ()


@pytest.mark.cuda
def test_kernels_of_a_replayed_graph_are_listed_and_attention_is_told_from_the_rest(tmp_path: Path) -> None:
    q = torch.ones(1, 2, 32, 64, device="cuda", dtype=torch.float16)
    graph, attend = torch.cuda.CUDAGraph(), torch.nn.functional.scaled_dot_product_attention
    attend(q, q, q)
    torch.mm(q[0, 0], q[0, 0].T)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attend(q, q, q)
    tracer = kernel_tracer(tmp_path)

    def eager() -> None:
        with tracer.attention():
            attend(q, q, q)

    seen: dict[str, KernelTrace] = {}
    for phase, run in (("extend", eager), ("decode", graph.replay)):

        def passes(forward_batch: Any, run: Callable[[], None] = run) -> None:
            torch.mm(q[0, 0], q[0, 0].T)
            run()

        runner = SimpleNamespace(forward=passes)
        watch(runner, "mine", object(), tmp_path)
        set_control(tmp_path, Control(profile=phase))
        runner.forward(batch(phase))
        seen[phase] = traced(tmp_path)
    extend, decode = traced(tmp_path).passes
    attention = {kernel.name for kernel in extend.kernels if kernel.kind == "device" and kernel.attention}
    rest = {kernel.name for kernel in extend.kernels if kernel.kind == "device" and kernel.attention is False}
    assert attention
    assert rest
    assert not attention & rest
    replayed = {kernel.name: kernel.attention for kernel in decode.kernels}
    assert attention <= set(replayed)
    assert {replayed[name] for name in attention} == {None}


def test_device_kernels_are_assigned_to_the_call_that_launched_them() -> None:
    def event(name: str, device: str, start: int = 0, duration: int = 0, correlation: int = 0, annotation: bool = False) -> Any:
        from torch._C._autograd import DeviceType

        return SimpleNamespace(
            name=lambda: name, device_type=lambda: getattr(DeviceType, device), start_ns=lambda: start,
            duration_ns=lambda: duration, correlation_id=lambda: correlation, is_user_annotation=lambda: annotation,
        )  # fmt: skip

    launches = [
        event("assay::attention", "CPU", 100, 50),
        event("assay::attention", "CUDA", 100, 50, annotation=True),
        event("aten::mm", "CPU", 10, 5, correlation=7),
        event("cudaLaunchKernel", "CPU", 12, 1, correlation=1),
        event("cuLaunchKernelEx", "CPU", 120, 1, correlation=2),
        event("cudaMemcpyAsync", "CPU", 130, 1, correlation=3),
        event("gemm", "CUDA", 500, 1, correlation=1),
        event("_attn_fwd", "CUDA", 600, 1, correlation=2),
        event("Memcpy DtoD (Device -> Device)", "CUDA", 700, 1, correlation=3),
        event("unlinked", "CUDA", 700, 1, correlation=9),
    ]
    found = {name: attention for _, name, _, attention in _kernels_in(launches)}
    assert found == {"gemm": False, "_attn_fwd": True, "unlinked": None}
    replay = [event("cudaGraphLaunch", "CPU", 12, 1, correlation=1), event("_attn_fwd", "CUDA", 500, 1, correlation=1)]
    assert [attention for _, _, _, attention in _kernels_in(replay)] == [None]
