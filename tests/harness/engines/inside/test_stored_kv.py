"""A KV cache in FP8 on stand-ins for SGLang's objects: what is observed of it, and who reads K and V before they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, StoredKV
from assay.harness.attention.declaration import declares
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.noise import FAMILIES
from assay.harness.attention.sample_calls import call_of
from assay.harness.backend import Backend
from assay.harness.checks.observed import Reader
from assay.harness.checks.replay import replay_recorded
from assay.harness.conditions import PHASES
from assay.harness.engines.inside.candidates import KernelCandidate
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.inside.truth_sums import TruthSums, _with_given
from assay.harness.engines.sglang.kv_pool import _scales_of, spec_of
from assay.harness.errors import UsageError
from assay.harness.evidence.error_table import relative_l1
from assay.harness.evidence.kernel_result import foreign_cause
from assay.harness.evidence.pack import Source, read_pack
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.judge.own_error import _known_differences, _recorded_phases
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.statement import state
from assay.harness.verdict import serious

STORED, K_SCALE, V_SCALE, LAYERS = torch.float8_e4m3fn, 0.05, 0.011, 3
Serving = Callable[..., tuple[Any, Shadow]]


@declares(features=("stored_kv",))
def right(call: AttentionCall) -> Tensor:
    return rounded_oracle(call)


@declares(features=("stored_kv",))
def k_scale_for_v(call: AttentionCall) -> Tensor:
    assert call.stored is not None
    return rounded_oracle(replace(call, v=(call.stored.v.float() * call.stored.k_scale).to(call.q.dtype)))


@declares(features=("stored_kv",))
def without_scales(call: AttentionCall) -> Tensor:
    assert call.stored is not None
    return rounded_oracle(replace(call, k=call.stored.k.float(), v=call.stored.v.float()))


@declares(features=("stored_kv",))
def scales_twice(call: AttentionCall) -> Tensor:
    assert call.stored is not None
    k, v = (
        (stored.float() * scale**2).to(call.q.dtype)
        for stored, scale in ((call.stored.k, call.stored.k_scale), (call.stored.v, call.stored.v_scale))
    )
    return rounded_oracle(replace(call, k=k, v=v))


@pytest.fixture
def serving(stand_in: ModuleType, tmp_path: Path) -> Serving:
    """Makes a server with a cache in FP8 and a kernel in its shadow; returns both."""

    class Stores(stand_in.Backend):  # type: ignore[misc]  # a module that a fixture gives
        """As SGLang's triton: it divides K and V in place when it writes them in decode, and in prefill reads them as given."""

        writes = (K_SCALE, V_SCALE)

        def _run(self, phase: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool) -> Tensor:
            given, pool = (k.clone(), v.clone()), self.runner.token_to_kv_pool
            for x, buffers, scale in ((k, pool.keys, self.writes[0]), (v, pool.values, self.writes[1])):
                buffers[layer.layer_id][batch.out_cache_loc] = x.div_(scale).to(STORED)
            call = self.pages.packed_call(spec_of(layer, {}, phase, "it"), q, layer, batch, batch.new, batch.prefix)
            return rounded_oracle(_with_given(call, *given) if phase == "extend" else call).reshape(q.shape[0], -1)

    def make(kernel: Kernel, budget: int = 2**20, writes: tuple[float, float] = (K_SCALE, V_SCALE)) -> tuple[Any, Shadow]:
        server = stand_in.Server()
        pool = server.runner.token_to_kv_pool
        pool.keys, pool.values = ([x.to(STORED) for x in buffers] for buffers in (pool.keys, pool.values))
        server.backend = Stores(server.runner)
        server.backend.writes = writes
        candidate = KernelCandidate("other", kernel)
        source = Source(engine="e", model="m", model_hash="", reference="mine", candidate="other")
        shadow = Shadow(tmp_path, candidate, partial(PackWriter, tmp_path / "pack", source, budget))
        stand_in.attach(server, tmp_path, candidate, shadow)
        set_control(tmp_path, Control(shadow=True))
        scales = {"k_scale_float": K_SCALE, "v_scale_float": V_SCALE}
        server.step("extend", [(40, 0), (17, 0)], **scales)
        server.step("extend", [(9, 40), (5, 17)], **scales)
        server.step("decode", [(1, 49), (1, 22)], **scales)
        shadow.write()
        return server, shadow

    return make


def test_a_right_kernel_is_right_although_the_reference_reads_new_k_and_v_as_given(serving: Serving, tmp_path: Path) -> None:
    serving(right)
    errors = read_shadow_errors(tmp_path)
    assert errors.failed_calls == ()
    assert errors.headers[0].untested == {}
    assert errors.headers[0].features == ("stored_kv",)
    assert errors.known == {(layer, "extend", "given") for layer in range(LAYERS)}
    against = compare_with_noise(errors)
    for measured in (against.cells, against.queries, against.reference, against.reference_queries):
        assert len(measured.index)
        assert not measured.flagged.any()
    assert [*_known_differences(errors)] == [state("difference-known", how="given", phase="extend", layers=[0, 1, 2])]


@pytest.mark.parametrize("kernel", [k_scale_for_v, without_scales])
def test_a_wrong_scale_is_wrong_in_every_layer_and_phase(kernel: Kernel, serving: Serving, tmp_path: Path) -> None:
    serving(kernel)
    against = compare_with_noise(read_shadow_errors(tmp_path))
    flagged = {(int(row[0]), PHASES[row[2]]) for row in against.cells.index[against.cells.flagged]}
    assert flagged == {(layer, phase) for layer in range(LAYERS) for phase in PHASES}
    assert not against.reference.flagged.any()


def test_a_kernel_that_could_not_have_read_them_as_given_is_not_excused_for_it(serving: Serving, tmp_path: Path) -> None:
    @declares(features=("stored_kv",))
    def rounds_once_more(call: AttentionCall) -> Tensor:
        return rounded_oracle(replace(call, v=call.v.to(torch.float8_e5m2).to(call.q.dtype)))

    serving(rounds_once_more)
    assert compare_with_noise(read_shadow_errors(tmp_path)).cells.flagged.any()


@pytest.mark.parametrize("reads_given", [False, True])
def test_outputs_of_k_and_v_as_given_are_right_only_of_what_has_these(reads_given: bool) -> None:
    plain = call_of([(24, 0)], (4, 2), 64, torch.float16, "cpu")
    stored = {name: (getattr(plain, name).float() / 0.25).to(STORED) for name in ("k", "v")}
    scale = torch.full((1, 1, 1), 0.25)
    kept = {name: (x.float() * 0.25).half() for name, x in stored.items()}
    call = replace(plain, **kept, stored=StoredKV(stored["k"], stored["v"], scale, scale))
    sums, rows = TruthSums(4, "", "", reads_given), np.arange(24)
    given = (plain.k, plain.v)
    sums.add(
        call, (rounded_oracle(plain), rounded_oracle(call)), rows, np.zeros(24, np.int64), 0, given=given,
    )  # fmt: skip
    table = sums.cells(0, 0)
    cells = table.chosen(table.index[:, 1] >= 0)  # without all heads together, whose sums are not kept
    errors, references = (relative_l1(role.own) for role in (cells.candidate, cells.reference))
    assert sums.known == ({"given"} if reads_given else set())
    assert bool((errors > 5 * references).all()) is not reads_given


def test_what_is_stored_is_recorded_with_its_scales(serving: Serving, tmp_path: Path) -> None:
    serving(right)
    for record in read_pack(tmp_path / "pack"):
        call = record.call
        assert call.features == ("stored_kv",)
        assert call.stored is not None
        assert call.stored.k.dtype == STORED
        assert (call.stored.k_scale.item(), call.stored.v_scale.item()) == (pytest.approx(K_SCALE), pytest.approx(V_SCALE))
        assert torch.equal(call.k, call.stored.k.float() * call.stored.k_scale)
    assert not serious(replay_recorded(tmp_path / "pack", Backend.parse("torch_native"), "", reader=Reader(0.0)).findings)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kernel", "bug"),
    [(k_scale_for_v, "stored-v-scaled-as-k"), (without_scales, "stored-scales-missing"), (scales_twice, "stored-scales-twice")],
)
def test_recorded_calls_name_a_wrong_scale(kernel: Kernel, bug: str, serving: Serving, tmp_path: Path) -> None:
    serving(kernel)
    found = serious(replay_recorded(tmp_path / "pack", Backend.parse("torch_native"), "", reader=Reader(0.0)).findings)
    assert bug in found[0].id


def test_recorded_calls_of_the_engines_own_backends_have_their_noise_and_prefill_is_left_to_the_shadow(
    serving: Serving, tmp_path: Path
) -> None:
    """SGLang's triton reads new tokens as given in prefill, which a pack does not have, and casts q and weights in decode."""

    @declares(features=("stored_kv",), noise="fp8_qp")
    def as_triton(call: AttentionCall) -> Tensor:
        if call.phase == "extend":  # as with other K than those that were stored
            return rounded_oracle(replace(call, k=call.k.to(torch.float8_e5m2).to(call.q.dtype)))
        return honest_outputs(call, FAMILIES["fp8_qp"], members=1, seed=5)[0].to(call.q.dtype)

    serving(as_triton)
    native = replay_recorded(tmp_path / "pack", Backend.parse("triton"), "")
    assert not native.findings
    assert "prefills with a cache of fewer bits were compared only in the shadow" in native.not_tested[-1]
    header, kernel = read_shadow_errors(tmp_path).headers[0], Backend.parse("assay.harness.attention.sdpa:torch_sdpa")
    assert foreign_cause(native, "triton", _recorded_phases(header, Backend.parse("triton")), tmp_path / "pack") == ""
    assert "left out" in foreign_cause(native, "triton", _recorded_phases(header, kernel), tmp_path / "pack")


def test_a_pack_of_nothing_but_such_prefills_says_so(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(right)
    prefills = [record for record in read_pack(tmp_path / "pack") if record.call.phase == "extend"]
    monkeypatch.setattr("assay.harness.checks.replay.read_pack", lambda pack: prefills)
    with pytest.raises(UsageError, match="only prefills with a cache of fewer bits"):
        replay_recorded(tmp_path / "pack", Backend.parse("triton"), "")


def test_a_reference_that_stores_something_else_is_said_and_proves_nothing(serving: Serving, tmp_path: Path) -> None:
    serving(right, writes=(K_SCALE, 1.0))
    untested = read_shadow_errors(tmp_path).headers[0].untested
    assert set(untested) == set(range(LAYERS))
    assert untested[0].startswith("KernelRefused: what the reference stored as V is not V divided by its scale, which is 0.011")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({}, (1.0, 1.0)),
        ({"k_scale": torch.tensor(0.5), "k_scale_float": 0.5, "v_scale": torch.tensor(2.0), "v_scale_float": 2.0}, (0.5, 2.0)),
        ({"k_scale": 0.25, "k_scale_float": None, "v_scale": 0.25, "v_scale_float": None}, (0.25, 0.25)),
    ],
    ids=["none", "of a checkpoint", "of --quantization-param-path"],
)
def test_scales_are_those_of_the_layer(layer: dict[str, Any], expected: tuple[float, float], stand_in: ModuleType) -> None:
    assert _scales_of(stand_in.layer_of(0, **layer)) == expected
