"""Observation of a vLLM runner, on stand-ins for its objects: one call of a layer holds sequences of both phases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, cumulative
from assay.harness.attention.declaration import declares
from assay.harness.engines.inside.control import KERNEL, SHADOW, Control, set_control
from assay.harness.engines.vllm.attach import observe_runner
from assay.harness.engines.vllm.fingerprint import _backends
from assay.harness.engines.vllm.kv_pages import Pages
from assay.harness.engines.vllm.plugin import observe_workers
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.error_table import relative_l1
from assay.harness.evidence.shadow_errors import read_shadow_errors

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 8, 16
# A chunk behind 20 tokens, a decode step, and a prompt.
NEW, PREFIX, PROMPT = (3, 1, 5), (20, 17, 0), (40, 17, 5)


class Layer:
    """A layer of vLLM: its implementation computes all sequences at once."""

    def __init__(self, number: int) -> None:
        self.layer_name = f"model.layers.{number}.self_attn.attn"
        self.attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        self.impl = SimpleNamespace(
            scale=DIM**-0.5, sliding_window=-1, logits_soft_cap=0, alibi_slopes=None, sinks=None, forward=self._forward
        )
        self.computed = 0

    def _forward(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: Any, output: Tensor, output_scale: Any = None
    ) -> Tensor:  # fmt: skip
        self.computed += 1
        lens = metadata.seq_lens.tolist()
        keys, values, _ = Pages(cache, None).gathered(metadata.block_table, [0] * len(lens), lens, q.dtype)
        call = AttentionCall(q, keys, values, metadata.query_start_loc, cumulative(lens), CallSpec(self.impl.scale))
        output.copy_(rounded_oracle(call))
        return output


class Runner:
    """vLLM's V1 runner, with a fixed batch."""

    def __init__(self) -> None:
        self.device, self.model = torch.device("cpu"), torch.nn.Module()
        self.layers = [Layer(number) for number in range(LAYERS)]
        self.compilation_config = SimpleNamespace(
            static_forward_context={layer.layer_name: layer for layer in self.layers} | {"other": object()}
        )
        self.model_config = SimpleNamespace(model="tiny", max_model_len=64)
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=32, enable_chunked_prefill=True, max_num_seqs=8),
            cache_config=SimpleNamespace(block_size=PAGE, enable_prefix_caching=True),
        )
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b", "c"], num_reqs=3, num_computed_tokens_cpu=torch.tensor(PREFIX).numpy(),
            num_prompt_tokens=torch.tensor(PROMPT).numpy(),
        )  # fmt: skip
        self.input_ids = SimpleNamespace(cpu=torch.arange(32))
        self.requests = {name: SimpleNamespace(num_prompt_tokens=length) for name, length in zip("abc", PROMPT, strict=True)}
        draw = torch.Generator().manual_seed(0)
        self.caches = [torch.randn(8, KV_HEADS, PAGE, 2 * DIM, generator=draw) for _ in range(LAYERS)]
        self.q = torch.randn(sum(NEW), HEADS, DIM, generator=draw)
        self.metadata: Any = SimpleNamespace(
            query_start_loc=cumulative(NEW), causal=True, seq_lens=torch.tensor([n + p for n, p in zip(NEW, PREFIX, strict=True)]),
            block_table=torch.tensor([[3, 1], [5, 2], [7, 0]], dtype=torch.int32),
        )  # fmt: skip
        self.outputs: list[Tensor] = []

    def execute_model(self, scheduled: Any) -> None:
        """Run the layers on the same q."""
        self.outputs = []
        for layer, cache in zip(self.layers, self.caches, strict=True):
            out = torch.zeros(sum(NEW), HEADS, DIM)
            given = torch.zeros(sum(NEW), KV_HEADS, DIM)
            layer.impl.forward(layer, self.q, given, given, cache, self.metadata, output=out, output_scale=None)
            self.outputs.append(out)

    def step(self) -> list[Tensor]:
        """Serve the batch once, and return the outputs of the layers."""
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict(zip("abc", NEW, strict=True)),
            scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=0)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[20, 17]),
        )
        self.execute_model(scheduled)
        return self.outputs


def right(call: AttentionCall) -> Tensor:
    """Compute the truth."""
    return rounded_oracle(call)


def zeros(call: AttentionCall) -> Tensor:
    """Compute nothing."""
    return torch.zeros_like(call.q)


@declares(phases=("decode",))
def for_decode(call: AttentionCall) -> Tensor:
    """Compute the truth of one phase alone."""
    return rounded_oracle(call)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner in a process in which vLLM's modules are stand-ins; its pages hold K and V side by side."""
    vllm, distributed = ModuleType("vllm"), ModuleType("vllm.distributed")
    vllm.__dict__["__version__"] = "0.0"
    distributed.__dict__.update(get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setattr(Pages, "of", classmethod(lambda cls, layer, cache, dtype: cls(cache, None)))
    here = ModuleType("kernels_of_this_test")
    here.__dict__.update(right=right, zeros=zeros, for_decode=for_decode)
    monkeypatch.setitem(sys.modules, here.__name__, here)
    return Runner()


def test_a_mixed_call_counts_once_in_each_phase_and_only_within_a_pass(runner: Runner, tmp_path: Path) -> None:
    before = runner.step()
    observe_runner(runner, tmp_path)
    layer = runner.layers[0]
    assert all(torch.equal(a, b) for a, b in zip(before, runner.step(), strict=True))
    out = torch.zeros_like(runner.q)
    layer.impl.forward(layer, runner.q, None, None, runner.caches[0], runner.metadata, output=out)  # a warm-up
    rows = {(row.phase, row.cached_prefix): row.calls_by_layer for row in read_counters(tmp_path / "counters")}
    assert rows == {("extend", True): {0: 1, 1: 1}, ("decode", True): {0: 1, 1: 1}}


def test_a_shadow_sees_both_phases_of_each_pass_once(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHADOW, "kernels_of_this_test:zeros")
    before = runner.step()
    observe_runner(runner, tmp_path)
    runner.step()  # to learn how many layers there are
    set_control(tmp_path, Control(shadow=True))
    after = runner.step()
    written = read_shadow_errors(tmp_path).cells
    assert relative_l1(written.distance(("phase", "layer"))) == pytest.approx(1.0), "written once both phases were seen"
    set_control(tmp_path, Control())
    runner.step()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    errors = read_shadow_errors(tmp_path)
    assert errors.failed_calls == ()
    assert errors.headers[0].untested == {}
    assert (errors.headers[0].passes, errors.headers[0].rows) == (2, sum(NEW))
    assert errors.cells.observed("phase") == ("extend", "decode")
    assert relative_l1(errors.cells.distance(("phase", "layer"))) == pytest.approx(1.0)


@pytest.mark.parametrize("kernel", ["", "kernels_of_this_test:zeros"])
def test_vllms_own_backend_is_a_candidate_beside_itself_and_beside_a_kernel(
    kernel: str, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHADOW, "CPU_ATTN")
    monkeypatch.setenv(KERNEL, kernel)
    observe_runner(runner, tmp_path)
    runner.step()
    set_control(tmp_path, Control(shadow=True))
    runner.step()
    set_control(tmp_path, Control())
    runner.step()
    errors = read_shadow_errors(tmp_path)
    assert errors.failed_calls == ()
    assert errors.cells.observed("phase") == ("extend", "decode")
    distances = errors.cells.candidate.own[:, :2].sum(0)
    assert distances[1] > 0
    assert distances[0] / distances[1] < 1e-6, "the candidate is right, whoever serves"
    monkeypatch.setenv(SHADOW, "FLASHINFER")
    with pytest.raises(KernelRefused, match="unknown candidate 'FLASHINFER'; expected a module:function or one of CPU_ATTN"):
        observe_runner(Runner(), tmp_path)


def served(runner: Runner) -> set[tuple[str, str, str]]:
    """Who computes attention, as a fingerprint records it: phase, layers, name."""
    config = SimpleNamespace(compilation_config=runner.compilation_config)
    return {(row.phase, row.layers, row.runs) for row in _backends(config, torch.nn.Module()) if row.operation == "attention"}


def test_a_fingerprint_names_the_kernel_that_computes_each_phase(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe_runner(runner, tmp_path)
    assert served(runner) == {("extend", "0-1", "CPU_ATTN"), ("decode", "0-1", "CPU_ATTN")}
    monkeypatch.setenv(KERNEL, "kernels_of_this_test:for_decode")
    observe_runner(other := Runner(), tmp_path)
    assert served(other) == {("extend", "0-1", "CPU_ATTN"), ("decode", "0-1", "kernels_of_this_test:for_decode")}


@pytest.mark.parametrize(("attribute", "kernel"), [(SHADOW, "zeros"), (KERNEL, "zeros"), (KERNEL, "right")])
def test_outputs_are_replaced_in_place(
    attribute: str, kernel: str, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(attribute, f"kernels_of_this_test:{kernel}")
    before = runner.step()
    observe_runner(runner, tmp_path)
    set_control(tmp_path, Control(substitute=(1,) if attribute == SHADOW else ()))
    first, second = runner.step()
    if kernel == "right":
        assert torch.equal(first, before[0])
    else:
        assert torch.equal(first, before[0]) is (attribute == SHADOW)
        assert not second.any()
    # vLLM's own function runs where a phase needs it.
    assert [layer.computed for layer in runner.layers] == ([2, 2] if attribute == SHADOW else [1, 1])


def test_a_worker_is_observed_once_its_model_is_loaded(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        worker: Any = None

        def init_device(self) -> None:
            self.worker = SimpleNamespace(model_runner=runner, load_model=lambda *, dummy: ("loaded", dummy))

    observe_workers(Wrapper, tmp_path)
    observe_workers(Wrapper, tmp_path)
    made = Wrapper()
    made.init_device()
    forward: Callable[..., Any] = runner.layers[0].impl.forward
    assert made.worker.load_model(dummy=True) == ("loaded", True)
    assert runner.layers[0].impl.forward is not forward
    runner.step()
    assert {row.calls_by_layer[0] for row in read_counters(tmp_path / "counters")} == {1}
