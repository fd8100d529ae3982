"""Two dumps: which tensors pair, which differ, and what is refused."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from assay.harness import cli
from assay.harness.errors import UsageError
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.tensors import reader
from assay.harness.ingest.tensors.dump import open_dump
from assay.harness.ingest.tensors.layout import DumpedModel, check_axes
from assay.harness.ingest.tensors.tensor_diff import TensorDiff, diff
from assay.harness.ingest.tensors.tensor_files import Unreadable
from assay.harness.judge.report import NOT_FINITE
from assay.reports.page import to_html
from assay.reports.tensor_dumps import tensor_diff_document

DATA = Path(__file__).parents[3] / "data" / "tensors"
LAYERS = 3


def _dump() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {"model.embed_tokens": torch.randn(6, 32).bfloat16()}
    for layer in reversed(range(LAYERS)):  # the file's order is not the depth's
        made[f"model.layers.{layer}.mlp.down_proj"] = torch.randn(6, 32).bfloat16()
        made[f"model.layers.{layer}.self_attn.attn"] = torch.randn(6, 4, 8).bfloat16()
    return made | {"model.norm": torch.randn(6, 32).bfloat16(), "lm_head": torch.randn(6, 50).bfloat16()}


def _compared(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda dump: None, **options: object) -> TensorDiff:
    a, b = _dump(), _dump()
    change(b)
    for name, one in (("a", a), ("b", b)):
        safetensors.torch.save_file(one, folder / f"{name}.safetensors")
    return diff(open_dump(folder / "a.safetensors"), open_dump(folder / "b.safetensors"), **options)  # type: ignore[arg-type]


def test_equal_dumps_pass(tmp_path: Path) -> None:
    result = _compared(tmp_path)
    assert (result.verdict, result.exit_code, result.compared, result.identical) == ("pass", 0, 9, 9)
    assert result.headline == "9 tensors are equal within bounds"


def test_the_first_difference_is_first_in_depth_and_the_worst_is_worst(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["lm_head"] *= 3
        dump["model.layers.2.self_attn.attn"] *= 1.1
        dump["model.layers.1.mlp.down_proj"][4] *= 1.2
        dump["model.layers.1.self_attn.attn"][2, 3] *= 1.1

    result = _compared(tmp_path, change)
    assert (result.verdict, result.exit_code, result.differing) == ("regression", 1, 4)
    assert result.first is not None
    assert result.worst is not None
    first = result.first
    assert (first.layer, first.boundary, first.head, first.token) == (1, "attention", 3, 2)
    assert (result.worst.tensor, result.worst.layer) == ("lm_head", None)
    assert [row.tensor for row in result.tensors] == [
        "model.layers.1.self_attn.attn", "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.attn", "lm_head",
    ]  # fmt: skip


def test_the_embedding_comes_before_the_layers(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["model.embed_tokens"] *= 2
        dump["model.layers.0.self_attn.attn"] *= 2

    first = _compared(tmp_path, change).first
    assert first is not None
    assert first.boundary == "embedding"


def test_what_is_not_finite_is_worst(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["model.layers.0.self_attn.attn"] *= 100
        dump["model.layers.2.self_attn.attn"][1, 1, 1] = float("nan")

    result = _compared(tmp_path, change)
    assert result.worst is not None
    assert (result.worst.layer, result.worst.error) == (2, NOT_FINITE)
    assert result.tensors[-1].not_finite == 1
    grid = next(grid for grid in result.grids if grid.where == "attention")
    assert grid.values[2][1] == NOT_FINITE
    assert json.loads(result.model_dump_json(by_alias=True))["schema"] == "assay.tensor-diff/1"


def test_noise_is_within_bounds_but_not_exact(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["lm_head"] *= 1 + 2**-7

    assert _compared(tmp_path, change).verdict == "pass"
    assert _compared(tmp_path, change, exact=True).verdict == "regression"
    assert _compared(tmp_path, change, tolerance=1e-4).verdict == "regression"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda dump: dump.pop("lm_head"), "only in A: lm_head"),
        (lambda dump: dump.update(extra=torch.ones(2)), "only in B: extra"),
        (lambda dump: dump.update(lm_head=torch.ones(2, 50)), r"shapes differ, \[6, 50\] and \[2, 50\]: lm_head"),
    ],
)
def test_what_does_not_pair_is_named_and_no_pass(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str) -> None:
    result = _compared(tmp_path, change)
    assert (result.verdict, result.exit_code, result.not_compared_count) == ("inconclusive", 3, 1)
    assert re.fullmatch(says, result.not_compared[0])


def test_other_dtypes_are_compared_unless_every_bit_must_be_equal(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["lm_head"] = dump["lm_head"].float()

    assert _compared(tmp_path, change).verdict == "pass"
    result = _compared(tmp_path, change, exact=True)
    assert (result.exit_code, "dtypes differ" in result.not_compared[0]) == (3, True)


def test_the_bound_is_that_of_the_coarser_dtype(tmp_path: Path) -> None:
    exact = torch.randn(6, 50)
    for name, one in (("a", exact), ("b", exact.bfloat16())):
        safetensors.torch.save_file({"lm_head": one}, tmp_path / f"{name}.safetensors")
    result = diff(open_dump(tmp_path / "a.safetensors"), open_dump(tmp_path / "b.safetensors"))
    assert (result.verdict, result.within) == ("pass", 1)


def test_a_dump_of_sglang_pairs_by_tags_and_splits_heads(tmp_path: Path) -> None:
    a = DATA / "sglang_dumper"
    b = tmp_path / "other"
    for file in a.rglob("*.pt"):
        held = torch.load(file, weights_only=True)
        name = re.sub(r"dump_index=(\d+)", lambda m: f"dump_index={int(m[1]) + 5}", file.name)
        if "step=3_" in name and "attn.output" in name:
            held["value"][4, 64:] *= 1.2
        b.mkdir(exist_ok=True)
        torch.save(held, b / name)
    result = diff(open_dump(a), open_dump(b), model=DumpedModel(heads=2, kv_heads=1, head_dim=64, layers=1))
    assert result.first is not None
    assert (result.first.layer, result.first.step, result.first.head, result.first.token) == (0, 3, 1, 4)
    assert (result.differing, result.not_compared_count) == (1, 0)  # request ids are no tensors, and no obstacle
    assert result.compared == 8 * 7


def test_pickled_objects_are_refused_and_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (ran,))

    torch.save({"x": torch.ones(2), "y": Evil()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(Unreadable) as raised:
            open_dump(tmp_path / name)
        assert "assay runs no code from a file" in str(raised.value)
    assert not ran.exists()


@pytest.mark.parametrize("cut", [4, 60, 400])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    safetensors.torch.save_file({"x": torch.ones(100)}, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:cut])
    with pytest.raises(Unreadable, match="not a whole safetensors file"):
        open_dump(tmp_path / "a.safetensors")


def test_a_header_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(Unreadable, match="lies outside"):
        open_dump(tmp_path / "a.safetensors")


def test_one_damaged_file_of_several_is_named(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        safetensors.torch.save_file({"x": torch.ones(100)}, tmp_path / side / "1.safetensors")
        (tmp_path / side / "2.safetensors").write_bytes(b"no")
    result = diff(open_dump(tmp_path / "a"), open_dump(tmp_path / "b"))
    assert (result.verdict, result.identical, result.not_compared_count) == ("inconclusive", 1, 2)


def test_a_folder_without_tensors_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no tensor file"):
        open_dump(tmp_path)


@pytest.mark.parametrize("axes", ["bhd", "thx", "dt", "ttd"])
def test_a_wrong_layout_is_a_usage_error(axes: str) -> None:
    with pytest.raises(UsageError):
        check_axes(axes)


@pytest.mark.parametrize("lost", [(slice(None), slice(None), -1), (1, 0, 3)], ids=["one dimension", "one element"])
def test_what_is_lost_among_many_elements_is_out_of_bounds(tmp_path: Path, lost: tuple[int | slice, ...]) -> None:
    values = torch.randn(6, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    name, changed = "model.layers.0.self_attn.attn", values.clone()
    changed[lost] = 0  # type: ignore[index]
    safetensors.torch.save_file({name: values}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({name: changed}, tmp_path / "b.safetensors")
    rounded = values + values.float().mul(torch.finfo(torch.bfloat16).eps).bfloat16()
    safetensors.torch.save_file({name: rounded}, tmp_path / "c.safetensors")
    a, b, c = (open_dump(tmp_path / f"{one}.safetensors") for one in "abc")
    assert diff(a, b).verdict == "regression"
    assert diff(a, c).verdict == "pass"  # a rounding of every element is within bounds


def test_two_dumps_without_an_element_prove_nothing(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(0, 4)}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({}, tmp_path / "b.safetensors")
    a = open_dump(tmp_path / "a.safetensors")
    found = diff(a, a)
    assert (found.verdict, found.compared, found.empty) == ("inconclusive", 0, 1)
    with pytest.raises(Unreadable, match="holds no tensor"):
        open_dump(tmp_path / "b.safetensors")


def test_two_tensors_with_other_names_are_compared_by_name(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(3)}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"y": torch.ones(3)}, tmp_path / "b.safetensors")
    found = diff(open_dump(tmp_path / "a.safetensors"), open_dump(tmp_path / "b.safetensors"))
    assert found.headline == "1 tensor is equal within bounds (x in A, y in B)"


def test_the_command_exits_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = _compared(tmp_path, lambda dump: dump["lm_head"].mul_(2))
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")

    def exit_code(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["assay", "tensors", "diff", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code or 0

    assert exit_code(a, b, "--json", "--html", str(tmp_path / "d.html")) == 1
    said = capsys.readouterr()
    assert "First and worst: outside of the layers, logits, token 0, of lm_head" in said.err
    assert TensorDiff.model_validate_json(said.out).first == result.first
    assert (tmp_path / "d.html").exists()
    shutil.copy(a, b)
    assert exit_code(a, b) == 0
    assert exit_code(a, a) == 2


def test_the_page_has_the_maps(tmp_path: Path) -> None:
    result = _compared(tmp_path, lambda dump: dump["model.layers.2.self_attn.attn"].mul_(2))
    page = to_html(tensor_diff_document(result))
    assert "1 of 9 tensors differ" in page
    grids = json.loads(re.search(r'<script type="application/json" id="grids">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    attention = next(grid for grid in grids if "attention" in grid["title"])
    assert attention["beyond"] == [[0] * 4, [0] * 4, [1] * 4]


def test_the_reader_tells_what_a_dump_holds() -> None:
    source = SourceFile.of(DATA / "sglang_dumper")
    assert reader.READER.recognises(source)
    document = reader.READER.read(source)
    assert (document.file.format, document.file.unit, document.file.read, document.file.unread) == (
        "tensors-sglang-dumper",
        "tensor",
        64,
        0,
    )
    one = SourceFile.of(next((DATA / "flashinfer").rglob("inputs.safetensors")))
    assert reader.READER.recognises(one)
    assert not reader.READER.recognises(SourceFile.of(Path(__file__)))
