"""FlashInfer Trace: packs as definitions and workloads, and back; checked with flashinfer-bench where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from assay.harness.attention.call import AttentionCall, CallSpec, Mask
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.cli.app import app, load_command
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.pack import CallMetadata, Source, read_pack
from assay.harness.ingest.tensors.flashinfer_trace import LARGEST_INPUT, _definition_of, calls_of, export_pack
from assay.harness.ingest.tensors.to_pack import trace_to_pack
from assay.harness.server.pack_writer import PackWriter

SOURCE = Source(engine="SGLang 0 on cpu", model="tiny", model_hash="", reference="torch_native")
NAME = "gqa_ragged_prefill_causal_h4_kv2_d32"


def _calls() -> list[AttentionCall]:
    """Without a prefix, with one, and two sequences of which one has a prefix."""
    return [call_of(seqs, (4, 2), 32, torch.bfloat16, "cpu") for seqs in ([(7, 0)], [(4, 20)], [(3, 9), (5, 0)])]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    writer = PackWriter(tmp_path / "pack", SOURCE, 1 << 24)
    for call in _calls():
        about = CallMetadata(0, "extend", tuple(call.lens_q), tuple(call.prefixes), tuple("r" for _ in call.lens_q))
        assert writer.wants(about)
        writer.add(about, call, oracle(call).to(call.q.dtype))
    writer.flush()
    made = export_pack(tmp_path / "pack", tmp_path / "trace")
    assert (made.definitions, made.workloads, made.with_prefix, made.refused) == ((NAME,), 3, 2, ())
    return tmp_path / "trace"


def _key(call: AttentionCall) -> tuple[object, ...]:
    return (
        tuple(call.lens_q),
        tuple(call.lens_k),
        call.scale,
        call.causal,
        float(call.q.double().sum()),
        float(call.v.double().sum()),
    )


def test_a_pack_comes_back_as_it_was(trace: Path, tmp_path: Path) -> None:
    made = trace_to_pack(trace, tmp_path / "back")
    assert (made.passes, made.with_prefix, made.refused) == (3, 2, ())
    back = read_pack(tmp_path / "back")
    assert sorted(map(repr, (_key(one.call) for one in back))) == sorted(map(repr, map(_key, _calls())))
    assert all(torch.equal(one.reference, oracle(one.call).to(torch.bfloat16)) for one in back)


def test_the_reference_is_the_oracle(trace: Path) -> None:
    """The code that is written for others to run is right: causal with and without a prefix, and without a mask."""
    for causal in (True, False):
        for call in _calls():
            call = call.with_spec(mask=Mask(causal))
            scope: dict[str, Any] = {}
            exec(_definition_of(call)["reference"], scope)
            out, lse = scope["run"](call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.scale)
            assert torch.equal(out, oracle(call).to(call.q.dtype))
            assert lse.shape == call.q.shape[:2]
            assert bool(lse.isfinite().all())


def test_the_base_of_the_log_sum_exp_is_two() -> None:
    call = call_of([(1, 0)], (1, 1), 32, torch.float32, "cpu")
    scope: dict[str, Any] = {}
    exec(_definition_of(call)["reference"], scope)
    _, lse = scope["run"](call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.scale)
    score = call.scale * (call.q.double() * call.k.double()).sum()
    assert float(2 ** lse[0, 0].double()) == pytest.approx(float(score.exp()), rel=1e-5)


def test_flashinfer_bench_reads_it(trace: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data")
    utils = pytest.importorskip("flashinfer_bench.bench.utils")
    read = data.TraceSet.from_path(str(trace))
    definition = read.definitions[NAME]
    assert len(read.workloads[NAME]) == 3
    for one in read.workloads[NAME]:
        inputs = utils.gen_inputs(definition, one.workload, "cpu", utils.load_safetensors(definition, one.workload, trace))
        assert definition.get_axes_values_from_inputs(inputs) == one.workload.axes
        scope: dict[str, Any] = {}
        exec(definition.reference, scope)
        out, _ = scope["run"](*inputs)
        assert torch.equal(out, oracle(AttentionCall(*inputs[:5], CallSpec(inputs[5]))).to(out.dtype))


def _edit(trace: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = trace / "workloads" / "gqa_ragged" / f"{NAME}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines[0])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: one["workload"]["inputs"]["q"].update(path="../pack/manifest.json"), "lies outside of the trace"),
        (lambda one: one["workload"]["inputs"]["q"].update(tensor_key="nope"), "there is no definition or input 'nope'"),
        (lambda one: one.update(definition="nope"), "there is no definition or input 'nope'"),
        (lambda one: one["workload"]["axes"].update(total_q=9), "its definition states"),
        (lambda one: one["workload"]["inputs"].update(qo_indptr={"type": "random"}), "random, so that the lengths are not known"),
        (lambda one: one.pop("workload"), "there is no definition or input 'workload'"),
    ],
)
def test_a_workload_that_cannot_be_used_is_named(trace: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    _edit(trace, change)
    problems: list[str] = []
    assert len(list(calls_of(trace, problems))) == 2
    assert len(problems) == 1
    assert says in problems[0]


def test_random_inputs_are_drawn_from_the_workload_id(trace: Path) -> None:
    _edit(trace, lambda one: one["workload"]["inputs"].update(q={"type": "random"}))
    first, again = (next(iter(calls_of(trace, []))) for _ in range(2))
    assert torch.equal(first.q, again.q)
    _edit(trace, lambda one: one["workload"].update(uuid="another"))
    assert not torch.equal(first.q, next(iter(calls_of(trace, []))).q)
    assert first.q.double().std() == pytest.approx(1.0, abs=0.2)


def test_a_paged_definition_of_theirs(tmp_path: Path) -> None:
    name, root = "gqa_paged_prefill_causal_h2_kv1_d16_ps4", tmp_path / "trace"
    const = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "page_size": 4}
    axes = {key: {"type": "const", "value": value} for key, value in const.items()}
    axes |= {key: {"type": "var"} for key in ("total_q", "num_pages", "len_indptr", "num_kv_indices", "batch_size")}
    cache = {"shape": ["num_pages", "page_size", "num_kv_heads", "head_dim"], "dtype": "bfloat16"}
    integers = {
        "qo_indptr": "len_indptr",
        "kv_indptr": "len_indptr",
        "kv_indices": "num_kv_indices",
        "kv_last_page_len": "batch_size",
    }
    inputs = {"q": {"shape": ["total_q", "num_qo_heads", "head_dim"], "dtype": "bfloat16"}, "k_cache": cache, "v_cache": cache}
    inputs |= {key: {"shape": [axis], "dtype": "int32"} for key, axis in integers.items()}
    definition = {
        "name": name,
        "op_type": "gqa_paged",
        "axes": axes,
        "inputs": inputs | {"sm_scale": {"shape": None, "dtype": "float32"}},
    }
    tensors = {
        "q": torch.randn(3, 2, 16).bfloat16(), "k_cache": torch.randn(5, 4, 1, 16).bfloat16(),
        "v_cache": torch.randn(5, 4, 1, 16).bfloat16(),
        "qo_indptr": torch.tensor([0, 2, 3], dtype=torch.int32), "kv_indptr": torch.tensor([0, 2, 3], dtype=torch.int32),
        "kv_indices": torch.tensor([4, 1, 2], dtype=torch.int32), "kv_last_page_len": torch.tensor([3, 2], dtype=torch.int32),
    }  # fmt: skip
    (root / "definitions").mkdir(parents=True)
    (root / "workloads").mkdir()
    (root / "definitions" / "d.json").write_text(json.dumps(definition | {"outputs": {}, "reference": "raise SystemExit"}))
    safetensors.torch.save_file(tensors, root / "t.safetensors")
    given = {key: {"type": "safetensors", "path": "t.safetensors", "tensor_key": key} for key in tensors}
    workload = {
        "axes": {"total_q": 3, "num_pages": 5, "len_indptr": 3, "num_kv_indices": 3, "batch_size": 2},
        "inputs": given | {"sm_scale": {"type": "scalar", "value": 0.25}}, "uuid": "u",
    }  # fmt: skip
    (root / "workloads" / "w.jsonl").write_text(json.dumps({"definition": name, "workload": workload}) + "\n")
    problems: list[str] = []
    [call] = calls_of(root, problems)
    assert problems == []
    assert (call.lens_q, call.lens_k, call.scale) == ([2, 1], [7, 2], 0.25)
    rows = torch.cat([tensors["k_cache"][4], tensors["k_cache"][1, :3], tensors["k_cache"][2, :2]])
    assert torch.equal(call.k, rows)


def test_an_input_is_not_drawn_however_many_rows_a_workload_states(trace: Path) -> None:
    def change(one: dict[str, Any]) -> None:
        one["workload"]["axes"].update(total_q=10**10)
        one["workload"]["inputs"].update(q={"type": "random"})

    _edit(trace, change)
    problems: list[str] = []
    assert len(list(calls_of(trace, problems))) == 2
    assert "10000000000" in problems[0]
    assert f"more than {LARGEST_INPUT:,} bytes" in problems[0]


def test_refusals(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has content"):
        export_pack(tmp_path / "pack", trace)
    (tmp_path / "empty" / "definitions").mkdir(parents=True)
    (tmp_path / "empty" / "workloads").mkdir()
    with pytest.raises(EvidenceError, match="cannot become a replay pack"):
        trace_to_pack(tmp_path / "empty", tmp_path / "back")


def test_the_commands(trace: Path, tmp_path: Path) -> None:
    load_command("pack")
    done = CliRunner().invoke(app, ["pack", "export", str(tmp_path / "pack"), "--flashinfer-trace", str(tmp_path / "again")])
    assert "3 workloads, 2 with a cached prefix, of 1 definitions" in done.output
    done = CliRunner().invoke(app, ["pack", "import", str(tmp_path / "again"), "--out", str(tmp_path / "back")])
    assert done.exit_code == 0
    assert "3 calls in the pack, 2 with a cached prefix. No output was dumped" in done.output
