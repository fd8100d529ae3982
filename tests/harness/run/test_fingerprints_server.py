"""The fingerprint of a server that was started for it, and of another before and after it got other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from assay.evals.tiny_model.families import SOURCE
from assay.harness.engines.launch import Launch
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.fingerprint import PARTS
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.parts import faults
from assay.harness.run.fingerprints import of_side
from assay.harness.sides import Side

pytestmark = [pytest.mark.server, pytest.mark.slow]
STALE = "model.layers.2.mlp.down_proj.weight"


def test_two_servers_serve_the_same_until_weights_come(tmp_path: Path) -> None:
    sent, partly = tmp_path / "sent", tmp_path / "partly"
    shutil.copytree(SOURCE, sent)
    weights = {name: weight * 1.25 for name, weight in load_file(SOURCE / "model.safetensors").items()}
    save_file(weights, sent / "model.safetensors", {"format": "pt"})
    shutil.copytree(sent, partly)
    save_file({name: each for name, each in weights.items() if name != STALE}, partly / "model.safetensors", {"format": "pt"})
    side = Side(backend="torch_native")
    own = of_side(side, "cpu", 900)
    assert [part for part in PARTS if not own.has(part)] == []
    assert faults(own) == []
    launch = Launch(
        role="candidate", backend="torch_native", model=SOURCE, device="cpu", evidence=tmp_path / "server", log=tmp_path / "log",
        decode_backend="torch_native", startup_timeout=900, request_timeout=300, cpu_core=0,
    )  # fmt: skip
    with SGLangServer(launch) as server:
        before = server.fingerprint()
        server.send("/update_weights_from_disk", {"model_path": str(partly)})
        after = server.fingerprint()
    assert before.not_observed == {}
    same = compare_fingerprints(own.model_copy(update={"asked": {}}), before)
    assert [each.says for each in same.undeclared] == []
    assert {"tokens", "rope", "weights", "positions", "backends", "arguments"} <= set(same.compared)
    assert before.tokens.eos == own.tokens.eos != ()
    alone = of_side(side.model_copy(update={"engine": "hf"}), "cpu", 900)
    for loaded in (own, before):
        beside = compare_fingerprints(alone, loaded.model_copy(update={"asked": own.asked}))
        assert [each.says for each in beside.undeclared] == []
        assert {"tokens", "generation", "rope", "weights"} <= set(beside.compared)
    changed = compare_fingerprints(before, after)
    assert changed.differences[0].name == "weights.other"
    expected = of_side(Side(backend="torch_native", model=str(sent)), "cpu", 900)
    missed = compare_fingerprints(expected.model_copy(update={"asked": {}}), after)
    assert missed.differences[0].says.startswith(f"1 of 26 parameters has different weights: {STALE}")


def test_two_ranks_hold_what_one_process_holds(tmp_path: Path) -> None:
    one, two = (of_side(Side(backend="torch_native", flags=flags), "cpu", 900) for flags in ((), ("--tp-size=2",)))
    diff = compare_fingerprints(one, two)
    assert [each.says for each in diff.undeclared] == []
    assert "weights" in diff.compared
    assert "weights.order" in diff.not_compared
    assert {weight.ranks for weight in two.weights or ()} == {1, 2}, "norms are whole in each, the others are shared"
    assert {weight.copied for weight in two.weights or () if weight.ranks == 1} == {True}
    assert two.positions == one.positions
    assert not any(weight.unlike_checkpoint or weight.not_in_checkpoint for weight in two.weights or ())

    permuted = tmp_path / "permuted"
    shutil.copytree(SOURCE, permuted)
    weights = load_file(SOURCE / "model.safetensors")
    cut_by_rows, cut_by_columns = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.o_proj.weight"
    for name in (cut_by_rows, cut_by_columns):
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, permuted / "model.safetensors", {"format": "pt"})
    other = of_side(Side(backend="torch_native", model=str(permuted), flags=("--tp-size=2",)), "cpu", 900)
    expected = (
        f"2 of 26 parameters have the same numbers in another order: model.layers.0.self_attn.qkv_proj.weight, {cut_by_columns}"
    )
    found = compare_fingerprints(two, other).undeclared
    assert [each.says for each in found if each.part == "weights"] == [expected]
