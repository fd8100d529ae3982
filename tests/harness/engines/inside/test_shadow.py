"""The shadow on stand-ins for SGLang's objects; real servers are shadowed in test_shadow_server.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle as right
from assay.harness.attention.call import AttentionCall, CallSpec, Kernel, Mask
from assay.harness.attention.declaration import declares
from assay.harness.attention.honest import MEMBERS
from assay.harness.attention.noise import NoiseFamily
from assay.harness.attention.oracle import attend, oracle, requests, scores
from assay.harness.backend import Backend
from assay.harness.checks.observed import Reader
from assay.harness.checks.replay import replay_recorded
from assay.harness.engines.inside import truth_sums
from assay.harness.engines.inside.candidates import Computes, KernelCandidate
from assay.harness.engines.inside.control import Control, set_control, write_now
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.sglang.served_kernel import _BackendCandidate
from assay.harness.evidence.error_table import QUERY, SUMS, elements, excess, relative_l1
from assay.harness.evidence.pack import Source, rank_folder, read_pack
from assay.harness.evidence.shadow_errors import ShadowErrors, read_shadow_errors
from assay.harness.judge.own_error import _check_layers
from assay.harness.judge.truth_bounds import AgainstNoise, compare_with_noise
from assay.harness.verdict import Check

HEADS, DIM, LAYERS = 4, 8, 3  # of the stand-ins
Shadowing = Callable[..., tuple[Any, Shadow]]


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shadowing(stand_in: ModuleType, tmp_path: Path) -> Shadowing:
    """Makes a server with a kernel in its shadow; returns both."""

    def make(kernel: Kernel | None, budget: int = 0, clock: Callable[[], float] = time.monotonic) -> tuple[Any, Shadow]:
        server = stand_in.Server()
        source = Source(engine="e", model="m", model_hash="", reference="mine", candidate="other")
        writer = partial(PackWriter, tmp_path / "pack", source, budget) if budget else None
        candidate = KernelCandidate("other", kernel) if kernel else None
        shadow = Shadow(tmp_path, candidate, writer, clock=clock)
        stand_in.attach(server, tmp_path, candidate, shadow)
        set_control(tmp_path, Control(shadow=True))
        return server, shadow

    return make


def seen(shadow: Shadow, folder: Path) -> ShadowErrors:
    shadow.write()
    return read_shadow_errors(folder)


def wrong_with_a_prefix(call: AttentionCall) -> Tensor:
    """Head 2 of layer 1 of every sequence with a cached prefix is doubled."""
    out = right(call)
    for start, stop, prefix in zip(call.cu_seqlens_q[:-1], call.cu_seqlens_q[1:], call.prefixes, strict=True):
        if prefix and call.layer == 1:
            out[start:stop, 2] *= 2
    return out


def test_a_fault_is_pinned_to_its_layer_head_and_prefix(shadowing: Shadowing, tmp_path: Path) -> None:
    server, shadow = shadowing(wrong_with_a_prefix)
    server.step("extend", [(5, 0), (6, 0)])
    server.step("extend", [(2, 5), (4, 6), (3, 0)], rids=["a", "b", "c"])
    cells = seen(shadow, tmp_path)
    cached = relative_l1(cells.cells.distance(where={"prefix": "2-15"}))
    wanted = np.zeros((LAYERS, HEADS))
    wanted[1, 2] = 1.0
    assert np.allclose(cached, wanted, atol=1e-6)
    assert relative_l1(cells.cells.distance(where={"prefix": "0"})).max() < 1e-6
    for other in ("1", ">= 16"):
        assert np.isnan(relative_l1(cells.cells.distance(where={"prefix": other}))).all()


def test_the_model_gets_the_references_output_whatever_the_candidate_does(
    shadowing: Shadowing, stand_in: ModuleType, tmp_path: Path
) -> None:
    def vandal(call: AttentionCall) -> Tensor:
        for tensor in (call.q, call.k, call.v):
            tensor.fill_(7.0)
        return torch.full((*call.q.shape[:2], DIM), torch.nan)

    plain, (shadowed, shadow) = stand_in.Server(), shadowing(vandal, budget=10**6)
    for lens in ([(5, 0)], [(3, 5)]):
        expected, got = plain.step("extend", lens), shadowed.step("extend", lens)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    cells = seen(shadow, tmp_path)
    assert np.isinf(relative_l1(cells.cells.distance())).all()
    kept = read_pack(tmp_path / "pack")
    assert {one.entry.chosen for one in kept} == {"sample", "worst"}
    for one in kept:
        assert torch.allclose(one.reference.double(), oracle(one.call), atol=1e-6)


def test_a_candidate_that_raises_is_noted_and_the_server_continues(shadowing: Shadowing, tmp_path: Path) -> None:
    attempts: list[int] = []

    def fragile(call: AttentionCall) -> Tensor:
        if call.layer == 2:
            attempts.append(call.layer)
            raise RuntimeError(f"attempt {len(attempts)}")
        return right(call)

    server, shadow = shadowing(fragile)
    for _ in range(2):
        assert len(server.step("extend", [(4, 0)])) == LAYERS
    cells = seen(shadow, tmp_path)
    (error,) = cells.failed_calls
    assert (error.layer, error.phase, error.calls, error.text) == (2, "extend", 2, "RuntimeError: attempt 1")
    assert cells.cells.observed("layer") == ("0", "1")


@pytest.mark.parametrize("phases", [("extend",), ("extend", "decode")])
def test_the_phases_that_the_candidate_declares_are_observed_and_batches_without_requests_are_not(
    shadowing: Shadowing, tmp_path: Path, phases: tuple[str, ...]
) -> None:
    server, shadow = shadowing(declares(phases=phases)(lambda call: wrong_with_a_prefix(call)))
    server.step("extend", [(4, 3)], rids=[])
    server.step("extend", [(5, 0), (9, 0)])
    server.step("decode", [(1, 5), (1, 9)])
    cells = seen(shadow, tmp_path)
    assert cells.headers[0].passes == 2
    assert cells.cells.observed("phase") == phases
    errors = relative_l1(cells.cells.distance(("phase", "layer", "head")))
    assert errors[0].max() < 1e-6
    assert len(phases) == 1 or errors[1, 1, 2] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "TARGET_VERIFY"}, "TARGET_VERIFY"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"use_irope": True}, "chunked local attention"),
        ({"arguments": {"k_rope": torch.zeros(HEADS)}}, "'k_rope'"),
    ],
)
def test_calls_that_the_contract_cannot_express_are_noted(
    shadowing: Shadowing, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    server, shadow = shadowing(right, budget=10**6)
    server.step("extend", [(4, 0)], **change)
    cells = seen(shadow, tmp_path)
    assert len(cells.failed_calls) == LAYERS
    assert words in cells.failed_calls[0].text
    assert not (tmp_path / "pack" / "calls").exists()


FEATURES = ("window", "softcap", "temperature", "sinks")
ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sliding_window_size": 2}, {"mask": Mask(window=3)}),
    ({"logit_cap": 1.0}, {"softcap": 1.0}),
    ({"xai_temperature_len": 2}, {"temperature": 2}),
    ({"arguments": {"sinks": torch.arange(HEADS) - 1.0}}, {"sinks": (-1.0, 0.0, 1.0, 2.0)}),
]


@pytest.mark.parametrize(("change", "asked"), ASKED)
def test_a_candidate_that_does_not_declare_a_feature_computes_nothing_and_the_calls_are_recorded(
    shadowing: Shadowing, tmp_path: Path, change: dict[str, Any], asked: dict[str, Any]
) -> None:
    server, shadow = shadowing(right, budget=10**6)
    server.step("extend", [(4, 0)], **change)
    cells = seen(shadow, tmp_path)
    [feature] = CallSpec(1.0, **asked).features
    assert [failed.text for failed in cells.failed_calls] == [
        f"KernelRefused: other does not declare {feature}, which this call asks for"
    ] * LAYERS
    recorded = read_pack(tmp_path / "pack")
    assert len(recorded) == LAYERS
    for record in recorded:
        assert replace(record.call.spec, scale=1.0, layer=0) == CallSpec(1.0, **asked)
        assert record.candidate is None


@pytest.mark.parametrize(("change", "asked"), ASKED)
@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_a_candidate_gets_what_a_layer_asks_for(
    shadowing: Shadowing, tmp_path: Path, phase: str, change: dict[str, Any], asked: dict[str, Any]
) -> None:
    kernel = declares(features=FEATURES)(lambda call: right(call))
    server, shadow = shadowing(kernel)
    lens = [(1, 9), (1, 4)] if phase == "decode" else [(6, 3)]
    server.step(phase, lens, **change)
    cells = seen(shadow, tmp_path)
    assert cells.failed_calls == ()
    assert cells.headers[0].features == CallSpec(1.0, **asked).features
    assert {effect[1:] for effect in cells.headers[0].effects} == {(phase, *CallSpec(1.0, **asked).features, True)}
    assert np.nanmax(relative_l1(cells.cells.candidate.own)) < 1e-6
    assert np.nanmax(relative_l1(cells.cells.reference.own)) > 1e-3, "the stand-in's backend knows no features"


def test_a_call_that_is_cut_to_a_kv_head_keeps_the_sinks_of_its_q_heads(shadowing: Shadowing, tmp_path: Path) -> None:
    kernel = declares(features=FEATURES)(lambda call: right(call))
    server, shadow = shadowing(kernel, budget=270_000)
    server.step("extend", [(64, 0)], arguments={"sinks": torch.arange(HEADS) * 1.0})
    seen(shadow, tmp_path)
    recorded = read_pack(tmp_path / "pack")
    assert {record.call.q.shape[1] for record in recorded} == {HEADS // 2}
    for record in recorded:
        first = record.call.spec.first_head
        assert record.call.spec.sinks == (float(first), first + 1.0)
        assert record.candidate is not None
        assert torch.allclose(right(record.call), record.candidate)


def test_an_sglang_backend_is_prepared_once_per_batch_and_writes_nothing(stand_in: ModuleType, tmp_path: Path) -> None:
    server = stand_in.Server()
    other = stand_in.Backend(server.runner)
    shadow = Shadow(tmp_path, _BackendCandidate("other", other), None)
    stand_in.attach(server, tmp_path, shadow=shadow)
    set_control(tmp_path, Control(shadow=True))
    server.step("extend", [(4, 0)])
    before = [keys.clone() for keys in server.runner.token_to_kv_pool.keys]
    other.runner = SimpleNamespace(token_to_kv_pool=None)  # a write would fail
    server.step("decode", [(1, 4)])
    cells = seen(shadow, tmp_path)
    assert cells.failed_calls == ()
    assert cells.cells.observed("phase") == ("extend", "decode")
    assert other.prepared == 2
    assert relative_l1(cells.cells.distance()).max() == 0
    assert not torch.equal(before[0], server.runner.token_to_kv_pool.keys[0])


def test_recording_needs_no_candidate(shadowing: Shadowing, tmp_path: Path) -> None:
    server, shadow = shadowing(None, budget=10**6)
    server.step("extend", [(4, 0)], rids=["x"])
    server.step("decode", [(1, 4)], rids=["x"])
    shadow.write()
    kept = read_pack(tmp_path / "pack")
    assert [(one.call.layer, one.call.phase) for one in kept] == [
        (i, phase) for i in range(LAYERS) for phase in ("decode", "extend")
    ]
    assert {one.entry.relative_l1 for one in kept} == {None}


def test_errors_are_written_on_request_and_at_intervals(shadowing: Shadowing, tmp_path: Path) -> None:
    clock = Clock()
    server, _ = shadowing(right, clock=clock)
    file = tmp_path / "shadow" / f"{os.getpid()}.safetensors"
    server.step("extend", [(4, 0)])
    assert not file.exists()  # the first pass learns how many layers there are
    server.step("extend", [(4, 0)])
    assert read_shadow_errors(tmp_path).headers[0].passes == 2
    server.step("extend", [(4, 0)])
    assert read_shadow_errors(tmp_path).headers[0].passes == 2
    clock.now += 1.0
    server.step("extend", [(4, 0)])
    assert read_shadow_errors(tmp_path).headers[0].passes == 4
    write_now(tmp_path, lambda: server.step("extend", [(4, 0)]) and None, timeout_s=1.0)
    assert read_shadow_errors(tmp_path).headers[0].passes == 5
    server.step("extend", [(4, 0)])
    assert read_shadow_errors(tmp_path).headers[0].passes == 5


def against(shadow: Shadow, folder: Path) -> AgainstNoise:
    return compare_with_noise(seen(shadow, folder))


def many_passes(server: Any) -> None:
    for number in range(6):
        server.step("extend", [(5, 0), (6, 0), (9, 0)])
        server.step("extend", [(2, 5), (4, 6), (3, 0)])
        server.step("decode", [(1, 5 + number), (1, 9)])


def dropping(call: AttentionCall) -> Tensor:
    """Leaves out the key with the smallest weight of each query, if that is 5 % at most."""
    outs = []
    for request in requests(call):
        logits = scores(request)
        weights = logits.softmax(-1).masked_fill(~request.asked_visible, torch.inf)
        lost = (weights == weights.amin(-1, keepdim=True)) & (weights <= 0.05)
        outs.append(attend(request, logits.masked_fill(lost, -torch.inf)))
    return torch.cat(outs, 1).transpose(0, 1).to(call.q.dtype)


@pytest.mark.parametrize("share", [0.0, pytest.param(0.001, marks=pytest.mark.slow), 0.05])
def test_a_candidate_may_leave_out_the_share_of_the_weights_that_it_declares(
    shadowing: Shadowing, tmp_path: Path, share: float
) -> None:
    server, shadow = shadowing(declares(noise=NoiseFamily(dropped=share))(lambda call: dropping(call)))
    many_passes(server)
    found = against(shadow, tmp_path)
    for tested in (found.cells, found.gains, found.queries, found.apart):
        assert bool(tested.flagged.any()) == (share < 0.05)
    for tested in (found.reference, found.reference_queries):
        assert not tested.flagged.any()


def test_backends_of_the_engine_have_the_noise_that_it_says_in_each_phase(stand_in: ModuleType, tmp_path: Path) -> None:
    asked = []

    def native_noise(names: Collection[str], phase: str, stored: bool) -> str:
        asked.append((tuple(names), phase, stored))
        return "merged_prefix" if phase == "extend" else ""

    candidate = KernelCandidate("other", right)
    shadow = Shadow(tmp_path, candidate, None, native_noise=native_noise)
    server = stand_in.Server()
    stand_in.attach(server, tmp_path, candidate, shadow)
    set_control(tmp_path, Control(shadow=True))
    server.step("extend", [(5, 0)])
    server.step("decode", [(1, 5)])
    header = seen(shadow, tmp_path).headers[0]
    assert (header.reference_noise, header.candidate_noise) == ("merged_prefix", "merged_prefix")
    (reference,) = shadow.references
    assert {((name,), phase, False) for name in ("other", reference) for phase in ("extend", "decode")} == set(asked)


def test_both_outputs_are_compared_with_the_truth_in_every_cell(shadowing: Shadowing, tmp_path: Path) -> None:
    server, shadow = shadowing(wrong_with_a_prefix)
    many_passes(server)
    errors = seen(shadow, tmp_path)
    table = errors.cells.chosen(errors.cells.index[:, 1] >= 0)
    assert table.candidate.honest.shape == table.reference.honest.shape == (len(table.index), MEMBERS, len(SUMS))
    assert not np.isnan(relative_l1(table.apart)).any()
    own = relative_l1(table.candidate.own)
    wrong = (table.index[:, :2] == (1, 2)).all(1) & (table.index[:, 3] != 0)
    assert np.allclose(own[wrong], 1.0)
    assert own[~wrong].max() < 1e-6
    assert relative_l1(table.reference.own).max() < 1e-6
    header = errors.headers[0]
    assert (header.rows, header.sampled_rows, header.heads) == (186, 186, dict.fromkeys(range(LAYERS), HEADS))
    compared = compare_with_noise(errors)
    assert (compared.cells.flagged == wrong).all()
    assert not compared.reference.flagged.any()


def test_an_exact_kernel_is_not_flagged_and_a_gain_of_a_thousandth_is(
    stand_in: ModuleType, shadowing: Shadowing, tmp_path: Path
) -> None:
    server, shadow = shadowing(right)
    many_passes(server)
    compared = against(shadow, tmp_path)
    assert not any(one.flagged.any() for one in (compared.cells, compared.gains, compared.apart))
    assert not compared.quiet
    server, shadow = shadowing(lambda call: right(call) * 1.001)
    many_passes(server)
    assert against(shadow, tmp_path).gains.flagged.all()


def test_a_kernel_that_declares_int8_and_computes_exactly_is_too_quiet(shadowing: Shadowing, tmp_path: Path) -> None:
    server, shadow = shadowing(declares(noise="int8_qk")(lambda call: right(call)))
    many_passes(server)
    errors = seen(shadow, tmp_path)
    compared = compare_with_noise(errors)
    assert {(layer, phase) for layer, phase, _, _ in compared.quiet} == {
        (layer, phase) for layer in range(LAYERS) for phase in ("extend", "decode")
    }
    assert not compared.cells.flagged.any()
    beside = errors.headers[0].model_copy(
        update={"candidate_noise": "fp8_qp"}
    )  # which triton has only where it reads a cache in FP8
    assert not compare_with_noise(replace(errors, headers=(beside,))).quiet


def test_of_a_large_call_a_sample_of_queries_is_compared(
    shadowing: Shadowing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truth_sums, "MAX_ROWS", 8)
    server, shadow = shadowing(right)
    server.step("extend", [(12, 0), (9, 5)])
    errors = seen(shadow, tmp_path)
    header = errors.headers[0]
    assert (header.rows, header.sampled_rows) == (21, 8)
    table = errors.cells.chosen((errors.cells.index[:, 0] == 0) & (errors.cells.index[:, 1] >= 0))
    assert elements(table.candidate.own).sum() == 8 * HEADS * DIM
    assert (elements(table.apart) >= elements(table.candidate.own)).all()


def test_a_call_that_cannot_be_compared_with_the_truth_is_named(shadowing: Shadowing, tmp_path: Path) -> None:
    server, shadow = shadowing(declares(noise="int8_qk")(lambda call: right(call)))
    shadow._candidate.computes = Computes(("extend",), "int3_qk")  # of a later version of assay, for example
    server.step("extend", [(4, 0)])
    errors = seen(shadow, tmp_path)
    assert sorted(errors.headers[0].untested) == list(range(LAYERS))
    assert "int3_qk" in errors.headers[0].untested[0]
    assert _check_layers(("layers",), errors, ("extend",), range(LAYERS)).status == "missing"


def test_processes_that_share_the_heads_are_joined(stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with 4 heads each: the second is wrong in its second head, the model's sixth."""

    def wrong(call: AttentionCall) -> Tensor:
        out = right(call)
        out[:, 1] *= 2
        return out

    def process(rank: int, kernel: Kernel) -> None:
        monkeypatch.setattr(os, "getpid", lambda: 1000 + rank)
        server = stand_in.Server(rank)
        source = Source(engine="e", model="m", model_hash="", reference="mine", candidate="other")
        writer = partial(PackWriter, rank_folder(tmp_path / "pack", rank), source, 10**6)
        shadow = Shadow(tmp_path, KernelCandidate("other", kernel), writer, rank=rank, ranks=2)
        stand_in.attach(server, tmp_path, shadow=shadow)
        server.step("extend", [(5, 0), (3, 2)])
        server.step("extend", [(4, 7)])
        shadow.write()

    def checked() -> Check:
        return _check_layers(("layers",), read_shadow_errors(tmp_path), ("extend",), range(LAYERS))

    set_control(tmp_path, Control(shadow=True))
    process(0, right)
    assert (checked().status, checked().outcome.values["phases"]) == ("missing", [["extend", 3, [0, 1, 2], [4, 5, 6, 7]]])
    process(1, wrong)
    assert checked().status == "ok"
    compared = compare_with_noise(read_shadow_errors(tmp_path))
    assert set(compared.cells.index[compared.cells.flagged, 1]) == {5}
    found = replay_recorded(tmp_path / "pack", Backend.parse("torch_native"), "", reader=Reader(0.0)).findings
    assert [one.where for one in found] == ["extend, all 3 layers, head 5 of 8"]


def test_a_wrong_query_that_no_sample_holds_is_compared_with_the_truth_and_named(shadowing: Shadowing, tmp_path: Path) -> None:
    def drops_a_query(call: AttentionCall) -> Tensor:
        out = right(call)
        if call.layer == 1:
            out[60 + 37, 2] = 0
        return out

    server, shadow = shadowing(drops_a_query)
    server.step("extend", [(60, 0), (61, 0), (62, 0)])  # of 183 queries 128 are sampled
    server.step("extend", [(60, 0), (61, 0), (62, 0)])
    errors = seen(shadow, tmp_path)
    compared = compare_with_noise(errors)
    flagged = compared.queries.index[compared.queries.flagged]
    assert {tuple(row) for row in flagged[:, :2]} == {(1, 2), (1, -1)}
    worst = errors.cells.candidate.worst
    assert set(worst[excess(worst) > 1][:, QUERY.index("position")]) == {37}
    assert compared.queries.observed.max() == pytest.approx(1.0, abs=0.01)
    assert not compared.reference_queries.flagged.any()
    # Queries that were chosen for their difference are no part of the sums.
    own = errors.cells.candidate.own[(errors.cells.index[:, :2] == (1, 2)).all(1)]
    assert elements(own).sum() == errors.headers[0].sampled_rows * DIM
