"""Control, substitution and trace on stand-ins for SGLang's objects; real servers are in test_shadow_server.py."""

from __future__ import annotations

import os
import re
import sys
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

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.bugs.faults import rounded_oracle as right
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.declaration import declares
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.noise import family as noise_family
from assay.harness.attention.oracle import oracle
from assay.harness.engines.inside.candidates import Candidate, KernelCandidate, LazyCandidate
from assay.harness.engines.inside.control import Control, TracedRequest, set_control, substituted_calls
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.inside.tracer import MAX_ROWS, decoder_layers, rows_of
from assay.harness.engines.sglang.served_kernel import _BackendCandidate, make_candidate
from assay.harness.errors import EvidenceError
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.error_table import relative_l1
from assay.harness.evidence.faults import SENSITIVITY, read_seeded_calls
from assay.harness.evidence.pack import Source, read_pack
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.evidence.trace import read_trace

HEADS, DIM, LAYERS = 4, 8, 3  # of the stand-ins
TOP_LEFT = fault("mask-top-left")
Attached = Callable[..., Any]


@pytest.fixture
def attached(stand_in: ModuleType, tmp_path: Path) -> Attached:
    """Makes a server with a kernel attached."""

    def make(kernel: Kernel | None = None, **options: Any) -> Any:
        server = stand_in.Server()
        candidate = KernelCandidate("other", kernel) if kernel else None
        stand_in.attach(server, tmp_path, candidate, **options)
        return server

    return make


@pytest.fixture
def plain(stand_in: ModuleType) -> Any:
    """A server with nothing attached that forms the same batches."""
    return stand_in.Server()


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(a, b, strict=True)]


# Control


def test_without_a_control_nothing_is_computed_or_written(plain: Any, stand_in: ModuleType, tmp_path: Path) -> None:
    def never() -> Candidate:
        raise AssertionError("the candidate was built")

    server = stand_in.Server()
    stand_in.attach(server, tmp_path, LazyCandidate("other", never))
    for _ in range(3):
        assert all(same(plain.step("extend", [(4, 0)]), server.step("extend", [(4, 0)])))
    assert list(tmp_path.iterdir()) == []


def test_a_control_applies_from_the_next_pass(attached: Attached, tmp_path: Path) -> None:
    calls: list[int] = []

    def counting(call: AttentionCall) -> Tensor:
        calls.append(call.layer)
        if call.layer == 0:
            set_control(tmp_path, Control())  # in the middle of a pass
        return right(call)

    server = attached(counting)
    server.step("extend", [(4, 0)])
    assert calls == []
    set_control(tmp_path, Control(shadow=True))
    server.step("extend", [(4, 0)])
    assert calls == [0, 1, 2]
    server.step("extend", [(4, 0)])
    assert calls == [0, 1, 2]


def test_a_new_session_forgets_the_one_before(stand_in: ModuleType, tmp_path: Path) -> None:
    server, wrong = stand_in.Server(), [True]
    source = Source(engine="e", model="m", model_hash="", reference="mine", candidate="other")
    candidate = KernelCandidate("other", lambda call: right(call) * (2 if wrong[0] else 1))
    shadow = Shadow(tmp_path, candidate, partial(PackWriter, tmp_path / "pack", source, 10**6))
    stand_in.attach(server, tmp_path, candidate, shadow)

    def ends() -> tuple[int, float, set[int]]:
        """Passes, error, and lengths of recorded calls of the session that has just ended."""
        set_control(tmp_path, Control())
        server.step("extend", [(9, 0)])  # only sees that the session has ended
        cells = read_shadow_errors(tmp_path)
        lengths = {one.entry.new[0] for one in read_pack(tmp_path / "pack")}
        error = relative_l1(cells.cells.distance(("phase",)))[0]
        return cells.headers[0].passes, float(error), lengths

    set_control(tmp_path, Control(shadow=True))
    server.step("extend", [(4, 0)])
    passes, error, lengths = ends()
    assert (passes, round(error, 3), lengths) == (1, 1.0, {4})
    wrong[0] = False
    set_control(tmp_path, Control(shadow=True))
    server.step("extend", [(5, 0)])
    set_control(tmp_path, Control(shadow=True, trace="a"))  # the session continues
    server.step("extend", [(3, 0)])
    passes, error, lengths = ends()
    assert (passes, error < 1e-6, lengths) == (2, True, {3, 5})
    for new in (4, 6):
        set_control(tmp_path, Control(shadow=True))
        server.step("extend", [(new, 0)])
        set_control(tmp_path, Control())  # no pass sees it before the next session
    set_control(tmp_path, Control(shadow=True))
    server.step("extend", [(7, 0)])
    passes, _, lengths = ends()
    assert (passes, lengths) == (1, {7})


def test_a_candidate_that_cannot_be_built_is_noted_in_the_shadow_and_stops_a_substitution(
    stand_in: ModuleType, tmp_path: Path
) -> None:
    attempts: list[int] = []

    def broken() -> Candidate:
        attempts.append(1)
        raise ImportError("no such module")

    server = stand_in.Server()
    stand_in.attach(server, tmp_path, LazyCandidate("other", broken))
    set_control(tmp_path, Control(shadow=True))
    for _ in range(3):
        server.step("extend", [(4, 0)])
    errors = read_shadow_errors(tmp_path).failed_calls
    assert [error.layer for error in errors] == [0, 1, 2]
    assert errors[0].text == "KernelRefused: other cannot be built: ImportError: no such module"
    assert len(attempts) == 1
    set_control(tmp_path, Control(substitute=(1,)))
    with pytest.raises(KernelRefused, match="other cannot be built"):
        server.step("extend", [(4, 0)])


def test_a_candidate_is_built_at_its_first_use_and_an_unknown_name_is_refused_at_once(
    stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def backend(runner: Any) -> Any:
        built.append("bare")
        return stand_in.Backend(runner)

    def metered(runner: Any) -> Any:
        raise AssertionError("a candidate is no server's backend")

    metered.__dict__["assay_unmetered"] = backend
    registry = ModuleType("registry")
    registry.__dict__["ATTENTION_BACKENDS"] = {"known": metered}
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", registry)
    runner = stand_in.Server().runner

    known, kernel = make_candidate("known", runner), make_candidate("no.such.module:kernel", runner)
    assert (known.name, kernel.name, built) == ("known", "no.such.module:kernel", [])
    assert known.computes.phases == ("extend", "decode")
    assert built == ["bare"]
    with pytest.raises(KernelRefused, match=r"no\.such\.module:kernel cannot be built"):
        _ = kernel.computes
    with pytest.raises(KernelRefused, match="unknown candidate 'unknown'; expected"):
        make_candidate("unknown", runner)


# Substitution


def test_only_substituted_layers_use_the_candidates_output(plain: Any, attached: Attached, tmp_path: Path) -> None:
    server = attached(TOP_LEFT)
    warm = [(3, 5), (2, 0)]
    for one in (plain, server):
        one.step("extend", [(5, 0)])
    assert same(plain.step("extend", warm), server.step("extend", warm)) == [True, True, True]
    set_control(tmp_path, Control(substitute=(0, 2)))
    expected, got = plain.step("extend", warm), server.step("extend", warm)
    assert same(expected, got) == [False, True, False]
    for one, other in zip(expected, got, strict=True):
        assert (one.shape, one.dtype, other.is_contiguous()) == (other.shape, other.dtype, True)
        assert torch.equal(one[3:], other[3:])  # the sequence without a prefix
    assert substituted_calls(tmp_path) == {0: 1, 2: 1}
    assert not (tmp_path / "shadow").exists()


def test_calls_with_an_axis_more_are_observed_as_the_others(stand_in: ModuleType, tmp_path: Path) -> None:
    """SGLang's Gemma 3 gives q as [1, tokens, heads, head_dim]; its layer makes K and V those of the others."""
    outs = []
    for name, axes in (("plain", False), ("more", True)):
        server = stand_in.Server()
        stand_in.attach(server, tmp_path / name, KernelCandidate("other", TOP_LEFT))
        if axes:
            forward = server.backend.forward_extend

            def given(q: Tensor, k: Tensor, *rest: Any, forward: Any = forward) -> Tensor:
                out = forward(q.view(1, len(q), HEADS, DIM), k, *rest)
                assert out.shape == (1, len(q), HEADS, DIM)
                return out.flatten(2)[0]  # type: ignore[no-any-return]

            server.backend.forward_extend = given
        server.step("extend", [(5, 0)])
        set_control(tmp_path / name, Control(substitute=(0, 2), shadow=True))
        outs.append(server.step("extend", [(3, 5)]))
    assert same(*outs) == [True, True, True]
    assert substituted_calls(tmp_path / "more") == {0: 1, 2: 1}


def test_substituted_calls_are_counted_since_the_latest_control(attached: Attached, tmp_path: Path) -> None:
    server = attached(right)
    set_control(tmp_path, Control(substitute=(1,)))
    for _ in range(3):
        server.step("extend", [(4, 0)])
    server.step("decode", [(1, 4)])
    assert substituted_calls(tmp_path) == {1: 4}
    (folder,) = (tmp_path / "substituted").iterdir()
    counts = {(row.kernel, row.phase, row.cached_prefix): row.calls for row in read_counters(folder)}
    assert counts == {("other", "extend", False): 3, ("other", "decode", True): 1}
    set_control(tmp_path, Control(substitute=(1,)))
    assert substituted_calls(tmp_path) == {}
    server.step("extend", [(4, 0)])
    assert substituted_calls(tmp_path) == {1: 1}
    set_control(tmp_path, Control())
    server.step("extend", [(4, 0)])
    assert substituted_calls(tmp_path) == {}


def test_a_phase_that_the_candidate_does_not_compute_stays_with_the_reference(
    plain: Any, attached: Attached, tmp_path: Path
) -> None:
    server = attached(declares(phases=("decode",))(lambda call: torch.zeros_like(call.q)))
    set_control(tmp_path, Control(substitute=(0, 1, 2)))
    assert all(same(plain.step("extend", [(4, 0)]), server.step("extend", [(4, 0)])))
    assert substituted_calls(tmp_path) == {}
    assert all(out.eq(0).all() for out in server.step("decode", [(1, 4)]))
    assert substituted_calls(tmp_path) == {0: 1, 1: 1, 2: 1}


def test_batches_without_requests_are_neither_substituted_nor_traced(plain: Any, attached: Attached, tmp_path: Path) -> None:
    server = attached(lambda call: torch.zeros_like(call.q))
    set_control(tmp_path, Control(substitute=(0, 1, 2), trace="one"))
    assert all(same(plain.step("extend", [(4, 0)], rids=[]), server.step("extend", [(4, 0)], rids=[])))
    with pytest.raises(EvidenceError, match="the server traced no pass"):
        read_trace(tmp_path, "one")


def raises(call: AttentionCall) -> Tensor:
    raise RuntimeError("out of shared memory")


@pytest.mark.parametrize(
    ("kernel", "words", "batch"),
    [
        (raises, "out of shared memory", {}),
        (lambda call: right(call)[1:], "returned torch.float32", {}),
        (lambda call: right(call).half(), "returned torch.float16", {}),
        (None, "no candidate", {}),
        (right, "TARGET_VERIFY", {"mode": "TARGET_VERIFY"}),
    ],
)
def test_nothing_falls_back_silently(
    attached: Attached, tmp_path: Path, kernel: Kernel | None, words: str, batch: dict[str, Any]
) -> None:
    server = attached(kernel)
    set_control(tmp_path, Control(substitute=(2,)))
    with pytest.raises(RuntimeError, match=words):
        server.step("extend", [(4, 0)], **batch)
    assert substituted_calls(tmp_path) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out[:, :DIM], r"other returned torch.float32 \[4, 8\] on cpu, expected .*, in layer 2"),
        (lambda out: out.half(), r"other returned torch.float16 \[4, 32\] on cpu, expected .*, in layer 2"),
    ],
)
def test_a_backend_that_returns_another_size_or_dtype_is_refused(
    stand_in: ModuleType, tmp_path: Path, change: Callable[[Tensor], Tensor], words: str
) -> None:
    class Changed(stand_in.Backend):  # type: ignore[name-defined, misc]
        def _run(self, *args: Any) -> Tensor:
            return change(super()._run(*args))

    server = stand_in.Server()
    stand_in.attach(server, tmp_path, _BackendCandidate("other", Changed(server.runner)))
    set_control(tmp_path, Control(shadow=True))
    for _ in range(2):
        server.step("extend", [(4, 0)])
    noted = {error.layer: error.text for error in read_shadow_errors(tmp_path).failed_calls}
    assert re.search(words, noted[2])
    set_control(tmp_path, Control(substitute=(2,)))
    with pytest.raises(KernelRefused, match=words):
        server.step("extend", [(4, 0)])


# Trace


def test_a_trace_has_the_outputs_that_the_model_used_in_each_pass(attached: Attached, tmp_path: Path) -> None:
    server = attached(lambda call: torch.zeros_like(call.q))
    server.step("extend", [(2, 0)])  # learns how many layers there are
    set_control(tmp_path, Control(trace="one", substitute=(1,)))
    outs = [server.step("extend", [(4, 2)], rids=["x"])]
    outs += [server.step("decode", [(1, 6)], rids=["x"]), server.step("decode", [(1, 7)], rids=["x"])]
    trace = read_trace(tmp_path, "one")
    assert trace.positions.tolist() == [2, 3, 4, 5, 6, 7]
    assert trace.tokens.tolist() == [1002, 1003, 1004, 1005, 1006, 1007]
    assert trace.phases == ("extend",) * 4 + ("decode",) * 2
    assert list(trace.outputs) == [0, 1, 2]
    for layer, outputs in trace.outputs.items():
        assert outputs.shape == (6, HEADS, DIM)
        assert np.array_equal(outputs.reshape(6, -1), torch.cat([out[layer] for out in outs]).numpy())
    assert not trace.outputs[1].any()
    assert trace.outputs[2].any()


@pytest.mark.parametrize("new", [1, 2, MAX_ROWS, MAX_ROWS + 1, 100, 4095])
def test_rows_are_evenly_spaced_and_include_the_last(new: int) -> None:
    rows = rows_of(new)
    assert len(rows) == min(new, MAX_ROWS)
    assert rows[-1] == new - 1
    gaps = np.diff(rows).tolist() or [1]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_a_trace_has_one_request(attached: Attached, tmp_path: Path) -> None:
    server = attached()
    server.step("extend", [(2, 0)])
    set_control(tmp_path, Control(trace="batch"))
    server.step("extend", [(2, 0), (3, 0)])
    set_control(tmp_path, Control(trace="twice"))
    server.step("extend", [(2, 0)], rids=["x"])
    server.step("extend", [(2, 0)], rids=["y"])
    for label in ("batch", "twice"):
        with pytest.raises(EvidenceError, match=f"'{label}' is incomplete: it started with request"):
            read_trace(tmp_path, label)


def test_a_trace_beyond_the_budget_is_refused_and_never_cut(attached: Attached, tmp_path: Path) -> None:
    one_pass = 2 * HEADS * DIM * 4 * LAYERS
    server = attached(trace_bytes=3 * one_pass - 1)
    server.step("extend", [(2, 0)])
    for label in ("fits", "not"):
        set_control(tmp_path, Control(trace=label))
        server.step("extend", [(2, 0)], rids=[label])
        server.step("decode", [(1, 2)], rids=[label])
    assert len(read_trace(tmp_path, "fits").positions) == 3
    server.step("extend", [(2, 0)], rids=["not"])
    with pytest.raises(EvidenceError, match=f"'not' is incomplete: .* exceed {3 * one_pass - 1} bytes"):
        read_trace(tmp_path, "not")


def test_processes_share_the_heads(stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    for rank, process in ((1, 11), (0, 12)):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        server = stand_in.Server(seed=rank)
        stand_in.attach(server, tmp_path, rank=rank, ranks=2)
        server.step("extend", [(2, 0)])
        set_control(tmp_path, Control(trace="one"))
        outs.append(server.step("extend", [(2, 0)], rids=["x"])[0].view(2, HEADS, DIM))
        set_control(tmp_path, Control())
        if rank == 1:
            with pytest.raises(EvidenceError, match="1 of 2 processes wrote layer 0 of pass 0"):
                read_trace(tmp_path, "one")
    assert np.array_equal(read_trace(tmp_path, "one").outputs[0], torch.cat(outs[::-1], 1).numpy())


def traced(server: Any, folder: Path, *passes: tuple[str, list[tuple[int, int]], list[str]], until: int) -> Any:
    """Trace request "x" up to a position over passes, and return the trace."""
    server.step("extend", [(2, 0)])
    set_control(folder, Control(trace="x", traced=TracedRequest(request="x", until=until)))
    for phase, lens, rids in passes:
        server.step(phase, lens, rids=rids)
    return read_trace(folder, "x")


def test_a_request_that_is_named_is_traced_with_its_inputs_in_any_batch(attached: Attached, tmp_path: Path) -> None:
    server = attached()
    passes = [
        ("extend", [(3, 0), (4, 2)], ["other", "x"]),
        ("extend", [(5, 0)], ["third"]),
        ("decode", [(1, 6), (1, 3)], ["x", "other"]),
    ]
    trace = traced(server, tmp_path, *passes, until=6)
    assert trace.positions.tolist() == [2, 3, 4, 5, 6]
    assert trace.tokens.tolist() == [2002, 2003, 2004, 2005, 1006], "second of the first batch, first of the last"
    assert list(trace.queries) == list(trace.keys) == list(trace.values) == list(trace.outputs) == [0, 1, 2]
    pool = server.runner.token_to_kv_pool
    for layer in range(LAYERS):
        assert trace.queries[layer].shape == trace.outputs[layer].shape == (5, HEADS, DIM)
        assert np.array_equal(trace.keys[layer], pool.keys[layer][:7].numpy()), "as the last query reads them"
        assert np.array_equal(trace.values[layer], pool.values[layer][:7].numpy())
        assert np.array_equal(trace.new_keys[layer][-1], trace.keys[layer][-1]), "what was computed last went into the cache"
        assert trace.new_values[layer].shape == (5, *pool.values[layer].shape[1:])
        outputs = trace.outputs[layer].reshape(5, 1, -1)
        assert np.array_equal(trace.layer_outputs[layer], 3 * outputs), "with the residual, in rows of the whole batch"


def test_layers_that_ran_outside_of_python_have_no_output_of_their_own(attached: Attached, tmp_path: Path) -> None:
    server, layers = attached(), []
    for layer in server.runner.model["layers"]:
        layers.append(layer._forward_hooks.copy())
        layer._forward_hooks.clear()
    trace = traced(server, tmp_path, ("extend", [(4, 0)], ["x"]), until=3)
    assert (list(trace.outputs), trace.layer_outputs) == ([0, 1, 2], {}), "it is written as the last attention returns"
    for layer, hooks in zip(server.runner.model["layers"], layers, strict=True):
        layer._forward_hooks.update(hooks)
    set_control(tmp_path, Control(trace="y", traced=TracedRequest(request="y", until=3)))
    server.step("extend", [(4, 0)], rids=["y"])
    assert list(read_trace(tmp_path, "y").layer_outputs) == [0, 1, 2], "and as the last layer does"


@pytest.mark.parametrize(("paths", "numbers"), [
    (["model.layers.0.self_attn.attn", "model.layers.11.self_attn.attn"], {0: "model.layers.0", 11: "model.layers.11"}),
    (["model.layers.0.attn.0", "model.layers.0.mlp.experts.3"], {0: "model.layers.0"}),
    (["vision.blocks.0.attn", "model.layers.0.attn", "model.layers.1.attn"], {1: "model.layers.1"}),
    (["attn"], {}),
])  # fmt: skip
def test_decoder_layers_are_the_numbered_modules_around_attention(paths: list[str], numbers: dict[int, str]) -> None:
    model = torch.nn.Module()
    for path in paths:
        at = model
        for name in path.split("."):
            if name not in at._modules:
                at.add_module(name, torch.nn.Module())
            at = at._modules[name]  # type: ignore[assignment]
        at.attends = "attn" in path  # type: ignore[assignment]
    found = decoder_layers(model, lambda module: bool(vars(module).get("attends")))
    assert found == {number: model.get_submodule(path) for number, path in numbers.items()}


def test_passes_without_a_named_request_or_after_its_last_position_refuse_nothing(attached: Attached, tmp_path: Path) -> None:
    server = attached()
    server.step("extend", [(2, 0)])
    set_control(tmp_path, Control(trace="x", traced=TracedRequest(request="x", until=3)))
    server.step("extend", [(4, 0)], rids=["other"], mode="TARGET_VERIFY")
    server.step("extend", [(4, 0)], rids=["x"])
    server.step("extend", [(4, 4)], rids=["x"], mode="TARGET_VERIFY")
    server.step("extend", [(6, 0)], rids=["x"])  # computed again
    assert read_trace(tmp_path, "x").positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("change", "said"), [({"mode": "TARGET_VERIFY"}, "TARGET_VERIFY"), ({"arguments": {"xyz": 1}}, "'xyz'")])
def test_a_named_request_that_cannot_be_described_or_packed_is_refused_and_the_model_goes_on(
    attached: Attached, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    server = attached()
    set_control(tmp_path, Control(trace="x", traced=TracedRequest(request="x", until=6)))
    server.step("extend", [(4, 0)], rids=["x"])
    assert len(server.step("extend", [(4, 4)], rids=["x"], **change)) == LAYERS
    with pytest.raises(EvidenceError, match=f"'x' is incomplete: .*{said}"):
        read_trace(tmp_path, "x")


# Seeded faults


def test_a_fault_is_switched_on_and_off_without_a_restart(plain: Any, attached: Attached, tmp_path: Path) -> None:
    server = attached()
    lens = [(5, 10), (4, 0)]
    assert all(same(server.step("extend", lens), plain.step("extend", lens)))
    token = set_control(tmp_path, Control(fault="mask-top-left"))
    for out, expected in zip(server.step("extend", lens), plain.step("extend", lens), strict=True):
        assert not torch.allclose(out[:5], expected[:5]), "the sequence with a cached prefix is wrong"
        assert torch.allclose(out[5:], expected[5:], atol=1e-5), "without a prefix, both masks are one"
    set_control(tmp_path, Control())
    assert all(same(server.step("extend", lens), plain.step("extend", lens)))
    seeded = read_seeded_calls(tmp_path, token)
    assert seeded is not None
    assert (seeded.fault, seeded.calls, seeded.changed, seeded.refused) == ("mask-top-left", LAYERS, LAYERS, 0)


def shadowed_with(fault_id: str, server: Any, plain: Any, folder: Path) -> list[Any]:
    """Errors by layer of the candidate, and of it with a fault, in sessions after each other that change no output."""
    for number in range(4):  # the last layer is known after the first pass
        set_control(folder, Control(shadow=True, fault=fault_id if number > 1 else ""))
        assert all(same(server.step("extend", [(5, 10)]), plain.step("extend", [(5, 10)])))
    set_control(folder, Control())
    server.step("extend", [(5, 10)])
    return [relative_l1(read_shadow_errors(place).cells.distance(("layer",))) for place in (folder, folder / SENSITIVITY)]


def test_in_the_shadow_a_fault_has_the_noise_that_the_candidate_declares(
    plain: Any, attached: Attached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anew = replace(BY_ID["mask-top-left"], compute=oracle)
    monkeypatch.setitem(BY_ID, "computed-anew", anew)

    @declares(noise="int8_qk")
    def noisy(call: AttentionCall) -> Tensor:
        return honest_outputs(call, noise_family("int8_qk"), members=1)[0].to(call.q.dtype)

    right, faulty = map(np.nanmin, shadowed_with("computed-anew", attached(noisy), plain, tmp_path))
    assert 0.5 * right < faulty < 2 * right, "the fault computes anew, in float64, and changes nothing"


def test_in_the_shadow_only_the_candidate_has_the_fault_and_its_errors_lie_elsewhere(
    plain: Any, attached: Attached, tmp_path: Path
) -> None:
    errors, faulty = shadowed_with("mask-top-left", attached(right), plain, tmp_path)
    assert np.nanmax(errors) < 1e-5
    assert np.nanmin(faulty) > 0.1


def test_what_the_contract_cannot_express_stays_right_and_is_counted(plain: Any, attached: Attached, tmp_path: Path) -> None:
    server = attached()
    assert all(same(server.step("extend", [(5, 10)]), plain.step("extend", [(5, 10)])))
    token = set_control(tmp_path, Control(fault="mask-top-left"))
    assert all(same(server.step("extend", [(5, 10)], use_irope=True), plain.step("extend", [(5, 10)], use_irope=True)))
    seeded = read_seeded_calls(tmp_path, token)
    assert seeded is not None
    assert (seeded.changed, seeded.refused) == (0, LAYERS)
    assert "chunked local attention" in seeded.why


def test_a_call_that_returns_parts_to_be_merged_is_said_and_not_substituted(stand_in: ModuleType, tmp_path: Path) -> None:
    """As of a chunked prefix cache, whose outputs come with their log-sum-exps."""
    server = stand_in.Server()
    whole = server.backend.forward_extend
    server.backend.forward_extend = lambda *args, **kwargs: (whole(*args, **kwargs), "lse")
    candidate = KernelCandidate("other", right)
    shadow = Shadow(tmp_path, candidate, None)
    stand_in.attach(server, tmp_path, candidate, shadow)
    set_control(tmp_path, Control(shadow=True))
    assert [lse for _, lse in server.step("extend", [(4, 0)])] == ["lse"] * LAYERS
    shadow.write()
    failed = read_shadow_errors(tmp_path).failed_calls
    assert [(calls.layer, calls.phase, calls.calls) for calls in failed] == [(layer, "extend", 1) for layer in range(LAYERS)]
    assert failed[0].text == "KernelRefused: a call returned parts that are merged later, which are not observed"
    set_control(tmp_path, Control(substitute=(1,)))
    with pytest.raises(KernelRefused, match="parts that are merged later"):
        server.step("extend", [(4, 0)])
