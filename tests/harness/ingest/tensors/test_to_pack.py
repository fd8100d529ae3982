"""Dumps made replay packs: of an unmodified SGLang server, of FlashInfer's API, and of hooks; what they lack is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.cli.app import app, load_command
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.pack import read_pack
from assay.harness.ingest.tensors.dump import Imported, open_dump
from assay.harness.ingest.tensors.forward_passes import DumpedPass, _MissingPart, _split
from assay.harness.ingest.tensors.histories import choose
from assay.harness.ingest.tensors.layout import DumpedModel
from assay.harness.ingest.tensors.to_pack import to_pack
from assay.harness.offline.replay import replay

DATA = Path(__file__).parents[3] / "data" / "tensors"
MODEL = DumpedModel(heads=2, kv_heads=1, head_dim=64, layers=1)
"""Of the excerpt: one kv head and two q heads of layer 0 of evals/tiny_model, dumped by SGLang 0.5.23 on a CPU (torch_native)."""
SERVED = [((20,), (0,)), ((1,), (20,)), ((5,), (17,)), ((1,), (22,)), ((18,), (0,)), ((1,), (18,)), ((3,), (16,)), ((1,), (19,))]
"""New tokens and cached prefix of its passes: another request left the prefix of the third and the seventh in the radix cache."""

Held = dict[str, Any]


def _made(dump: Path, folder: Path, model: DumpedModel | None = MODEL) -> Imported:
    return to_pack(open_dump(dump), folder, model)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Callable[[str, Held], bool]], Path]:
    """A copy of the server's dump, without the files for which a function returns False; it may change what they hold."""

    def edit(keep: Callable[[str, Held], bool]) -> Path:
        folder = tmp_path / "dump"
        for file in (DATA / "sglang_dumper").rglob("*.pt"):
            held = torch.load(file, weights_only=True)
            if keep(file.name, held):
                folder.mkdir(exist_ok=True)
                torch.save(held, folder / file.name)
        return folder

    return edit


def test_an_unmodified_server_yields_a_pack_with_cached_prefixes(tmp_path: Path) -> None:
    made = _made(DATA / "sglang_dumper", tmp_path / "pack")
    assert (made.passes, made.checked, made.with_prefix, made.refused) == (8, 8, 6, ())
    recorded = read_pack(tmp_path / "pack")
    assert sorted((one.entry.new, one.entry.prefix) for one in recorded) == sorted(SERVED)
    for one in recorded:
        error = (one.reference.double() - oracle(one.call)).abs().sum() / oracle(one.call).abs().sum()
        assert error < 0.01
        assert (one.call.q.shape[1:], one.call.k.shape[1:]) == ((2, 64), (1, 64))


def test_the_pack_finds_the_top_left_mask_and_passes_a_right_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _made(DATA / "sglang_dumper", tmp_path / "pack")
    (tmp_path / "kernels_for_dumps.py").write_text(
        "from assay.harness.bugs.faults import fault, rounded_oracle\ntop_left, right = fault('mask-top-left'), rounded_oracle\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = replay(tmp_path / "pack", "kernels_for_dumps:top_left", read_out=0)
    assert (found.verdict, found.findings[0].id) == ("regression", "mask-top-left")
    passed = replay(tmp_path / "pack", "kernels_for_dumps:right", read_out=0)
    assert (passed.verdict, passed.findings) == ("pass", ())


def test_the_prefix_of_another_request_is_refused_if_its_tokens_are_not_in_the_dump(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    dump = edited(lambda name, held: "step=1_" not in name)  # the request that left the prefix of the third pass
    made = _made(dump, tmp_path / "pack")
    reasons = dict(made.refused)
    assert reasons["a call with a cached prefix: k and v of its cached prefix are not in the dump"] == 3
    assert sorted(one.entry.prefix for one in read_pack(tmp_path / "pack")) == [(0,), (16,), (18,), (19,)]


def test_two_requests_may_have_left_a_prefix_and_the_output_tells_which(edited: Callable[..., Path], tmp_path: Path) -> None:
    # The last request's 16 cached tokens could be those of any request but for the outputs that were dumped.
    _made(DATA / "sglang_dumper", tmp_path / "checked")
    by_output = next(one for one in read_pack(tmp_path / "checked") if one.entry.prefix == (16,))
    dump = edited(lambda name, held: "attn.output" not in name)
    made = _made(dump, tmp_path / "pack")
    assert any("no output was dumped that shows which" in reason for reason, _ in made.refused)
    assert (16,) not in [one.entry.prefix for one in read_pack(tmp_path / "pack")]
    donor = torch.load(next((DATA / "sglang_dumper").rglob("step=5_*attn.inputs.1_*")), weights_only=True)["value"]
    assert torch.equal(by_output.call.k[:16, 0], donor[:16])


def test_an_output_that_is_not_the_attention_of_its_inputs_is_refused(edited: Callable[..., Path], tmp_path: Path) -> None:
    def keep(name: str, held: Held) -> bool:
        if "step=1_" in name and "attn.output" in name:
            held["value"] *= 1.5
        return True

    made = _made(edited(keep), tmp_path / "pack")
    assert (20,) not in [one.entry.new for one in read_pack(tmp_path / "pack")]
    assert made.refused == (("a call: its dumped output is not the attention of the q, k and v that were dumped", 1),)


@pytest.mark.parametrize("missing", ["name=positions", "name=seq_lens", "attn.inputs.2"])
def test_what_a_pass_lacks_is_named(edited: Callable[..., Path], tmp_path: Path, missing: str) -> None:
    with pytest.raises(EvidenceError, match=r"pass 1 lacks (positions|seq_lens|attention calls)") as raised:
        _made(edited(lambda name, held: missing not in name), tmp_path / "pack")
    assert "cannot become a replay pack" in raised.value.found
    assert not (tmp_path / "pack").exists()


def test_the_head_dim_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="--model"):
        _made(DATA / "sglang_dumper", tmp_path / "pack", None)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_flashinfer_dumps_have_the_whole_cache(tmp_path: Path, kind: str) -> None:
    """Logged by FlashInfer's own api_logging.py; the mask of the paged call is set after plan(), as SGLang does."""
    dump = tmp_path / "dump"
    shutil.copytree(DATA / "flashinfer", dump)
    if kind == "torch":
        for file in dump.rglob("*.safetensors"):
            torch.save(safetensors.torch.load_file(file), file.with_suffix(".pt"))
            file.unlink()
    made = _made(dump, tmp_path / "pack", None)
    assert (made.passes, made.checked, made.refused) == (3, 3, ())
    recorded = {one.entry.new: one for one in read_pack(tmp_path / "pack")}
    assert {new: one.entry.prefix for new, one in recorded.items()} == {(4, 3): (6, 4), (5,): (7,), (6,): (3,)}
    assert all(one.call.causal for one in recorded.values())


def test_a_run_without_its_plan_is_refused(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    shutil.copytree(DATA / "flashinfer", dump, ignore=shutil.ignore_patterns("*.plan_*"))
    made = _made(dump, tmp_path / "pack", None)
    assert made.passes == 1
    assert all("its plan() is not in the dump" in reason for reason, _ in made.refused)


def test_hooks_on_a_hugging_face_model(tmp_path: Path) -> None:
    call = call_of([(3, 0), (3, 5)], (4, 2), 32, torch.float32, "cpu")
    held = {}
    for layer, rows_q, rows_k in ((0, slice(0, 3), slice(0, 3)), (1, slice(3, 6), slice(3, 11))):
        base = f"model.layers.{layer}.self_attn"
        held |= {
            f"{base}.query": call.q[rows_q].transpose(0, 1)[None].contiguous(),
            f"{base}.key": call.k[rows_k].transpose(0, 1)[None].contiguous(),
            f"{base}.value": call.v[rows_k].transpose(0, 1)[None].contiguous(),
            f"{base}.attn_output": oracle(call)[rows_q].float()[None].contiguous(),
        }
    safetensors.torch.save_file(held, tmp_path / "hooks.safetensors")
    made = _made(tmp_path / "hooks.safetensors", tmp_path / "pack", None)
    assert (made.checked, made.refused) == (2, ())
    assert [(one.call.layer, one.entry.new, one.entry.prefix) for one in read_pack(tmp_path / "pack")] == [
        (0, (3,), (0,)),
        (1, (3,), (5,)),
    ]


def test_projections_before_the_rotary_embedding_are_refused_by_name(tmp_path: Path) -> None:
    held = {f"model.layers.0.self_attn.{name}_proj": torch.ones(1, 4, 32) for name in "qkv"}
    safetensors.torch.save_file(held, tmp_path / "hooks.safetensors")
    with pytest.raises(EvidenceError, match="precede the rotary embedding"):
        _made(tmp_path / "hooks.safetensors", tmp_path / "pack", None)


def test_a_batch_is_split_by_lengths() -> None:
    positions = torch.tensor([0, 1, 2, 17, 18, 9])
    parts = _split(0, positions, [3, 19, 10], ["a", "b", "c"])
    assert [(part.request, part.prefix, part.new) for part in parts] == [("a", 0, 3), ("b", 17, 2), ("c", 9, 1)]
    assert [(part.prefix, part.new) for part in _split(0, positions, None, ())] == [(0, 3), (17, 2), (9, 1)]
    with pytest.raises(_MissingPart, match="lengths of its 4 sequences"):
        _split(0, positions, None, (), 4)
    with pytest.raises(_MissingPart):
        _split(0, positions, [3, 18, 10], ())
    with pytest.raises(_MissingPart):
        _split(0, torch.tensor([0, 1, 7]), [3], ())


def test_the_prefix_that_fits_is_chosen_not_the_first() -> None:
    computed = DumpedPass(0, (), None, {})
    wrong, fitting = [(computed, slice(0, 1))], [(computed, slice(0, 2))]
    assert choose(iter([wrong, fitting]), lambda one: one is fitting) == (fitting, "")
    assert choose(iter([wrong]), lambda one: False)[0] is None


def test_decode_rows_whose_positions_go_on_are_two_sequences() -> None:
    assert [part.prefix for part in _split(0, torch.tensor([10, 11]), None, (), 2)] == [10, 11]
    assert [part.prefix for part in _split(0, torch.tensor([10, 11]), [11, 12], ())] == [10, 11]


def test_the_command_imports_and_says_what_it_refused(tmp_path: Path) -> None:
    load_command("pack")
    config = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["pack", "import", str(DATA / "sglang_dumper"), "--out", str(tmp_path / "pack"), "--model", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "8 calls in the pack, 6 with a cached prefix. 8 dumped outputs were checked" in done.output


def test_a_model_without_heads_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="does not state a model's heads"):
        DumpedModel.of(tmp_path)
