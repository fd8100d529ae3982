"""Replay packs: what is kept, what is read back, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.inside.pack_writer import _RESERVOIR, PackWriter, stratum
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.pack import PackEntry, Source, hash_pack, rank_folder, read_manifest, read_pack

SOURCE = Source(engine="SGLang 0 on cpu", model="tiny", model_hash="abc", reference="torch_native", candidate="mine")
BUDGET = 2**28


def offer(
    writer: PackWriter, lens: list[tuple[int, int]], layer: int = 0, error: float | None = None,
    worst_at: tuple[int, int, int] = (0, 0, 0), head_dim: int = 8, dtype: torch.dtype = torch.float32, scale: float = 1.0,
) -> AttentionCall:  # fmt: skip
    """Offer a call as the shadow does: as a sample, or as a worst one if it has an error."""
    call = call_of(lens, (4, 2), head_dim, dtype, "cpu", seed=layer).with_spec(layer=layer, scale=scale)
    reference = oracle(call).to(dtype)
    if error is not None and writer.wants_worst(layer, call.phase, error):
        writer.add(call, reference, error, worst_at)
    elif error is None and writer.wants(stratum(layer, call.phase, call.lens_q, call.prefixes)):
        writer.add(call, reference)
    return call


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_is_read_as_it_was_recorded(tmp_path: Path, dtype: torch.dtype) -> None:
    writer = PackWriter(tmp_path / "pack", SOURCE, BUDGET)
    call = offer(writer, [(3, 0), (2, 17)], layer=2, dtype=dtype)
    writer.flush()
    (one,) = read_pack(tmp_path / "pack")
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        assert torch.equal(getattr(one.call, name), getattr(call, name))
        assert getattr(one.call, name).dtype == getattr(call, name).dtype
    assert (one.call.scale, one.call.causal, one.call.layer, one.call.phase) == (call.scale, True, 2, "extend")
    assert torch.equal(one.reference, oracle(call).to(dtype))
    assert (one.entry.new, one.entry.prefix) == ((3, 2), (0, 17))
    assert read_manifest(tmp_path / "pack").source == SOURCE
    assert json.loads((tmp_path / "pack" / "manifest.json").read_text())["schema"] == "assay.pack/3"


def test_the_sample_is_stratified_and_the_budget_is_kept(tmp_path: Path) -> None:
    budget = 100_000
    writer = PackWriter(tmp_path / "pack", SOURCE, budget)
    for step in range(300):
        offer(writer, [(4, (0, 1, 5, 20)[step % 4])], layer=0 if step < 200 else step % 3)
        if step % 50 == 0:
            writer.flush()
            assert size(tmp_path / "pack") <= budget
    writer.flush()
    assert size(tmp_path / "pack") <= budget
    counts = Counter((one.call.layer, one.entry.prefix) for one in read_pack(tmp_path / "pack"))
    assert len(counts) == 12
    assert max(counts.values()) <= _RESERVOIR
    assert read_manifest(tmp_path / "pack").seen == 300


def test_a_reservoir_also_keeps_late_calls(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "pack", SOURCE, BUDGET)
    for step in range(200):
        offer(writer, [(2, 0)], scale=float(step))
    writer.flush()
    kept = [one.call.scale for one in read_pack(tmp_path / "pack")]
    assert len(kept) == _RESERVOIR
    assert max(kept) >= 50


def test_the_worst_call_of_a_layer_replaces_milder_ones(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "pack", SOURCE, BUDGET)
    for step, error in enumerate([0.1, 0.5, 0.3, float("inf"), 2.0]):
        offer(writer, [(2, 3)], layer=1, error=error, scale=float(step))
    offer(writer, [(2, 3)], layer=2, error=0.2)
    offer(writer, [(2, 3)], layer=3, error=0.0)
    writer.flush()
    kept = read_pack(tmp_path / "pack")
    assert [(one.call.layer, one.entry.relative_l1, one.entry.chosen) for one in kept] == [
        (1, float("inf"), "worst"),
        (2, 0.2, "worst"),
    ]
    assert kept[0].call.scale == 3
    assert len(list((tmp_path / "pack" / "calls").iterdir())) == 2


def test_the_worst_calls_leave_room_for_the_sample(tmp_path: Path) -> None:
    budget = 100_000
    writer = PackWriter(tmp_path / "pack", SOURCE, budget)
    for layer in range(20):
        offer(writer, [(4, 5)], layer=layer)
        offer(writer, [(4, 5)], layer=layer, error=1.0 + layer)
    writer.flush()
    kept = read_pack(tmp_path / "pack")
    worst = sorted(one.call.layer for one in kept if one.entry.chosen == "worst")
    assert 5 <= len(worst) < 20
    assert worst == list(range(20 - len(worst), 20))
    assert len([one for one in kept if one.entry.chosen == "sample"]) >= 5
    assert size(tmp_path / "pack") <= budget


def test_a_large_call_is_cut_without_changing_its_condition(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "pack", SOURCE, 32 * 15_000)
    call = offer(writer, [(30, 0), (20, 40), (5, 5)], error=1.0, worst_at=(1, 3, 0))
    writer.flush()
    (one,) = read_pack(tmp_path / "pack")
    entry = one.entry
    assert (entry.new, entry.prefix, entry.spec.first_head) == ((20,), (40,), 2)
    assert one.call.q.shape == (20, 2, 8)
    assert one.call.k.shape == (60, 1, 8)
    assert torch.equal(one.call.q, call.q[30:50, 2:4])
    assert torch.allclose(one.reference.double(), oracle(one.call), atol=1e-6)


@pytest.mark.parametrize(("worst", "kept"), [(3, slice(0, 46)), (45, slice(0, 46)), (100, slice(82, 101)), (499, None)])
def test_of_a_sequence_that_is_too_large_some_queries_are_kept(tmp_path: Path, worst: int, kept: slice | None) -> None:
    writer = PackWriter(tmp_path / "pack", SOURCE, 8 * 15_000)
    call = offer(writer, [(6, 0), (500, 30)], error=1.0, worst_at=(1, 1, worst))
    writer.flush()
    manifest = read_manifest(tmp_path / "pack")
    if kept is None:
        assert (manifest.calls, manifest.too_large) == ((), 1)
        return
    (one,) = read_pack(tmp_path / "pack")
    assert (one.entry.first_query, one.entry.new, one.entry.prefix) == (
        kept.start, (kept.stop - kept.start,), (30 + kept.start,),
    )  # fmt: skip
    assert one.served_prefixes == (30,)
    assert torch.equal(one.call.q, call.q[6:][kept, :2])
    assert one.call.lens_k == [30 + kept.stop]
    assert torch.allclose(one.reference.double(), oracle(one.call), atol=1e-6), "as a call of its own it has the same answers"


def test_processes_that_share_the_heads_record_one_pack(tmp_path: Path) -> None:
    for rank in (1, 0):
        writer = PackWriter(rank_folder(tmp_path / "pack", rank), SOURCE, BUDGET)
        call = call_of([(3, 2)], (2, 1), 8, torch.float32, "cpu", seed=rank)
        writer.add(call, oracle(call).float(), first_head=2 * rank)
        writer.flush()
    before = hash_pack(tmp_path / "pack")
    assert [one.call.spec.first_head for one in read_pack(tmp_path / "pack")] == [0, 2]
    manifest = tmp_path / "pack" / "rank-1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tiny"', '"other"'))
    assert hash_pack(tmp_path / "pack") != before
    with pytest.raises(EvidenceError, match="a different server"):
        read_pack(tmp_path / "pack")


def test_a_new_pack_replaces_an_old_one_and_nothing_else(tmp_path: Path) -> None:
    for layer in (1, 2):
        writer = PackWriter(tmp_path / "pack", SOURCE, BUDGET)
        offer(writer, [(2, 0)], layer=layer)
        writer.flush()
    assert [one.call.layer for one in read_pack(tmp_path / "pack")] == [2]
    assert len(list((tmp_path / "pack" / "calls").iterdir())) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a pack"):
        PackWriter(tmp_path / "other", SOURCE, BUDGET)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    writer = PackWriter(tmp_path / "pack", SOURCE, BUDGET)
    offer(writer, [(2, 0)])
    writer.flush()
    return tmp_path / "pack"


def entry(pack: Path) -> PackEntry:
    return read_manifest(pack).calls[0]


def test_a_folder_without_a_pack_is_wrong_use(pack: Path, tmp_path: Path) -> None:
    not_a_pack = "is not a replay pack"
    for folder, says in (
        (tmp_path, not_a_pack),
        (tmp_path / "nowhere", "nowhere does not exist"),
        (pack / "manifest.json", not_a_pack),
    ):
        with pytest.raises(UsageError, match=says):
            read_pack(folder)
    manifest = pack / "manifest.json"
    manifest.write_text(manifest.read_text().replace("assay.pack/3", "assay.pack/9"))
    with pytest.raises(UsageError, match=r"does not have schema assay\.pack/3"):
        read_pack(pack)


def test_damage_is_named(pack: Path) -> None:
    file = pack / entry(pack).file
    content = file.read_bytes()
    for damaged in (content[:-7], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(EvidenceError, match="is damaged: its hash"):
            read_pack(pack)
    name = entry(pack).file
    file.unlink()
    with pytest.raises(EvidenceError, match="cannot be read"):
        read_pack(pack)
    manifest = pack / "manifest.json"
    whole = manifest.read_text()
    for damaged in (whole[:-20], whole.replace(name, "../secret.safetensors")):  # no manifest names files elsewhere
        manifest.write_text(damaged)
        with pytest.raises(EvidenceError, match="is damaged"):
            read_pack(pack)


def asking(call: AttentionCall) -> AttentionCall:
    """Ask for all that a call can carry."""
    q = torch.cat([call.q, call.q[:2]])
    stored = {f"stored_{name}": (8 * getattr(call, name)).to(torch.int8) for name in ("k", "v")}
    scales = {"k_scale": torch.full((len(call.k), 2, 1), 0.125), "v_scale": torch.full((1, 1, 1), 0.125)}
    dequantised = {name: stored[f"stored_{name}"] * 0.125 for name in ("k", "v")}
    spec = {
        "sinks": (0.5, -1.0, 2.0, 0.0), "temperature": 4, "softcap": 2.0, "padded_rows": 2, "mask": Mask(window=9),
    }  # fmt: skip
    return call.with_tensors({"q": q, **stored, **scales, **dequantised}).with_spec(**spec)


@pytest.mark.parametrize("budget", [BUDGET, 3 * 2**16, 2**17])
def test_what_a_call_asks_for_is_kept_also_of_a_part_of_it(tmp_path: Path, budget: int) -> None:
    writer = PackWriter(tmp_path / "pack", SOURCE, budget)
    lens = [(3, 4), (5, 20), (2, 9)]
    call = asking(call_of(lens, (4, 2), 8, torch.float32, "cpu"))
    right = oracle(call)
    writer.add(call, right.float(), 1.0, (1, 3, 0))
    writer.flush()
    (one,) = read_pack(tmp_path / "pack")
    sequences = slice(0, 10) if len(one.entry.new) == 3 else slice(3, 8)
    heads = slice(one.entry.spec.first_head, one.entry.spec.first_head + one.call.q.shape[1])
    torch.testing.assert_close(oracle(one.call), right[sequences, heads])
    torch.testing.assert_close(one.reference.double(), right[sequences, heads], rtol=1e-5, atol=1e-5)
    assert set(one.call.features) == set(call.features) - {"padding"}
    kept = one.call.stored
    assert kept is not None
    assert torch.equal(kept.k * kept.k_scale, one.call.k)
    assert torch.equal(kept.v * kept.v_scale, one.call.v)
    if budget == BUDGET:
        assert one.call.spec == replace(call.spec, padded_rows=0)
    else:
        assert len(one.entry.new) == 1
