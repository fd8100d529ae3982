"""Two files or folders of tensors: which pair, which differ, and what is refused."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.comparison import ComparedTensors, Comparison
from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.tensor_diff import TensorRule, diff_tensors
from assay.harness.ingest.tensor_files import open_dump
from assay.harness.ingest.tensor_layout import check_axes
from assay.harness.judge.report import NOT_FINITE
from assay.harness.statement import Statement, state
from assay.reports.wording.say import say

LAYERS = 3
RULE = TensorRule()
BY_HEAD = TensorRule(axes="thd")


def tensors(result: Comparison) -> ComparedTensors:
    assert result.tensors is not None
    return result.tensors


def _dump() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {"model.embed_tokens": torch.randn(6, 32).bfloat16()}
    for layer in reversed(range(LAYERS)):  # the file's order is not the depth's
        made[f"model.layers.{layer}.mlp.down_proj"] = torch.randn(6, 32).bfloat16()
        made[f"model.layers.{layer}.self_attn.attn"] = torch.randn(6, 4, 8).bfloat16()
    return made | {"model.norm": torch.randn(6, 32).bfloat16(), "lm_head": torch.randn(6, 50).bfloat16()}


def _compared(
    folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda dump: None, rule: TensorRule = BY_HEAD
) -> Comparison:
    a, b = _dump(), _dump()
    change(b)
    for name, one in (("a", a), ("b", b)):
        safetensors.torch.save_file(one, folder / f"{name}.safetensors")
    return diff_tensors(folder / "a.safetensors", folder / "b.safetensors", rule)


def test_the_first_difference_is_first_in_depth_and_the_worst_is_worst(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["lm_head"] *= 3
        dump["model.embed_tokens"][0] *= 1.1
        dump["model.layers.2.self_attn.attn"] *= 1.1
        dump["model.layers.1.mlp.down_proj"][4] *= 1.2
        dump["model.layers.1.self_attn.attn"][2, 3] *= 1.1

    compared = _compared(tmp_path, change)
    result = tensors(compared)
    assert (compared.verdict, compared.exit_code, result.pairs, result.differing) == ("regression", 1, 9, 5)
    name = "model.embed_tokens"
    place = {"layer": None, "boundary": "embedding", "name": name, "step": 0, "index": [0], "axes": ""}
    assert compared.why == (state("tensors-differ", differing=5, compared=9, **place),)
    assert result.first == result.tensors[0].first
    assert result.worst == result.tensors[-1].worst
    inside = result.tensors[1].first
    assert inside is not None
    assert (inside.layer, inside.boundary, inside.index, inside.axes) == (1, "attention", (2, 3), "th")
    assert [row.worst.tensor for row in result.tensors] == [
        name, "model.layers.1.self_attn.attn", "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.attn", "lm_head",
    ]  # fmt: skip


def test_what_is_not_finite_is_worst(tmp_path: Path) -> None:
    def change(dump: dict[str, Tensor]) -> None:
        dump["model.layers.0.self_attn.attn"] *= 100
        dump["model.layers.2.self_attn.attn"][1, 1, 1] = float("nan")

    result = tensors(_compared(tmp_path, change))
    assert result.worst is not None
    assert (result.worst.layer, result.worst.error) == (2, NOT_FINITE)
    grid = next(grid for grid in result.grids if grid.where == "attention")
    assert grid.values[2][1] == NOT_FINITE


def _noisy(dump: dict[str, Tensor]) -> None:
    dump["lm_head"] *= 1 + 2**-7


def _wider(dump: dict[str, Tensor]) -> None:
    dump["lm_head"] = dump["lm_head"].float() * (1 + 2**-8)  # within the bound of the coarser dtype


@pytest.mark.parametrize(
    ("change", "tolerance", "verdict", "missing"),
    [
        (lambda _: None, None, "pass", None), (_noisy, None, "pass", None), (_wider, None, "pass", None),
        (_noisy, 0, "regression", None), (_noisy, 1e-4, "regression", None),
        (_wider, 0, "inconclusive", state("dtypes-differ", a="torch.bfloat16", b="torch.float32", tensor="lm_head")),
        (lambda dump: dump.pop("lm_head"), None, "inconclusive", state("tensor-in-one", side="A", tensor="lm_head")),
        (lambda dump: dump.update(extra=torch.ones(2)), None, "inconclusive", state("tensor-in-one", side="B", tensor="extra")),
        (lambda dump: dump.update(lm_head=torch.ones(2, 50)), None, "inconclusive",
         state("shapes-differ", a=[6, 50], b=[2, 50], tensor="lm_head")),
    ],
)  # fmt: skip
def test_what_rounding_explains_passes_unless_bits_must_be_equal_and_what_does_not_pair_is_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], tolerance: float | None, verdict: str, missing: Statement | None
) -> None:
    result = _compared(tmp_path, change, TensorRule(tolerance=tolerance, axes="thd"))
    assert (result.verdict, tensors(result).not_compared) == (verdict, (missing,) if missing else ())
    assert (tensors(result).not_compared_count, len(result.why)) == (bool(missing), 1)
    if missing:
        assert (result.why[0].id, result.why[0].values["not_compared"]) == ("tensors-equal", 1)


def test_numbered_files_are_passes(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for step in (2, 3):
            values = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            if (side, step) == ("b", 3):
                values[4, 1] *= 1.2
            torch.save({"model": {"layers.0.self_attn.attn": values}}, tmp_path / side / f"pass_{step}.pt")
    result = tensors(diff_tensors(tmp_path / "a", tmp_path / "b", BY_HEAD))
    assert result.first is not None
    assert (result.first.layer, result.first.step, result.first.index) == (0, 3, (4, 1))
    assert (result.pairs, result.differing) == (2, 1)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_one_file_are_compared_by_layer(tmp_path: Path, save: Callable[..., None]) -> None:
    made = {f"model.layers.{n}.self_attn.attn": np.ones((6, 4, 8), np.float16) for n in range(3)}
    save(tmp_path / "a.npz", **made)
    np.savez(tmp_path / "same.npz", **made)
    made["model.layers.1.self_attn.attn"][2] = 0
    np.savez(tmp_path / "wrong.npz", **made)
    assert diff_tensors(tmp_path / "a.npz", tmp_path / "same.npz", RULE).verdict == "pass"
    first = tensors(diff_tensors(tmp_path / "a.npz", tmp_path / "wrong.npz", BY_HEAD)).first
    assert first is not None
    assert (first.layer, first.index) == (1, (2, 0))


def test_arrays_of_a_folder_pair_by_their_paths_whatever_their_byte_order(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        for layer in range(2):
            array = np.arange(1, 13, dtype=">f4").reshape(3, 4) * (factor if layer else 1)
            np.save(tmp_path / name / f"layers.{layer}.out.npy", np.asfortranarray(array))
    result = diff_tensors(tmp_path / "a", tmp_path / "b", RULE)
    assert (result.verdict, tensors(result).pairs, tensors(result).identical) == ("regression", 2, 1)


def test_pickled_objects_are_refused_and_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (ran,))

    torch.save({"x": torch.ones(2), "y": Evil()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(EvidenceError) as raised:
            open_dump(tmp_path / name)
        assert "assay runs no code from a file" in str(raised.value)
    assert not ran.exists()


def test_one_damaged_file_of_several_is_named(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        safetensors.torch.save_file({"x": torch.ones(100)}, tmp_path / side / "1.safetensors")
        (tmp_path / side / "2.safetensors").write_bytes(b"no")
    compared = diff_tensors(tmp_path / "a", tmp_path / "b", RULE)
    result = tensors(compared)
    assert (compared.verdict, result.identical, result.not_compared_count) == ("inconclusive", 1, 2)


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
    a, b, c = (tmp_path / f"{one}.safetensors" for one in "abc")
    assert diff_tensors(a, b, RULE).verdict == "regression"
    assert diff_tensors(a, c, RULE).verdict == "pass"  # a rounding of every element is within bounds


def test_two_dumps_without_an_element_prove_nothing(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(0, 4)}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({}, tmp_path / "b.safetensors")
    found = diff_tensors(tmp_path / "a.safetensors", tmp_path / "a.safetensors", RULE)
    assert (found.verdict, tensors(found).pairs, tensors(found).empty) == ("inconclusive", 0, 1)
    assert found.why == (state("no-tensor-compared", why=[]),)
    with pytest.raises(EvidenceError, match="holds no tensor"):
        open_dump(tmp_path / "b.safetensors")


def test_two_tensors_with_other_names_are_compared_by_name(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(3)}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"y": torch.ones(3)}, tmp_path / "b.safetensors")
    found = diff_tensors(tmp_path / "a.safetensors", tmp_path / "b.safetensors", RULE)
    assert (found.verdict, tensors(found).pairs, found.why[0].values["names"]) == ("pass", 1, ["x", "y"])


def saved(path: Path, values: Tensor) -> Path:
    """A file of one tensor, in the format that its name ends in."""
    {
        ".npz": lambda: np.savez(path, values.numpy()),
        ".npy": lambda: np.save(path, values.numpy()),
        ".pt": lambda: torch.save(values, path),
        ".safetensors": lambda: safetensors.torch.save_file({"x": values}, path),
    }[path.suffix]()
    return path


@pytest.mark.parametrize("suffix", ["npz", "npy", "pt", "safetensors"])
def test_a_tensor_of_each_format_is_read_and_a_truncated_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path / f"a.{suffix}", torch.ones(100))
    file = ingest([path]).documents[0].file
    assert (file.format, file.unit, file.read, file.unread) == ("tensors", "tensor", 1, 0)
    for cut in (4, 60, 400):
        short = path.with_stem(f"first-{cut}")  # files stay open by their names
        short.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(EvidenceError, match="not a whole tensor file"):
            open_dump(short)


def test_headers_that_lie_and_arrays_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    np.save(tmp_path / "pickle.npy", np.array([object()]))
    np.save(tmp_path / "typeless.npy", np.zeros(4, "V2"))
    for path in tmp_path.iterdir():
        with pytest.raises(EvidenceError):
            open_dump(path)


def one_wrong(
    folder: Path, shape: tuple[int, ...], at: tuple[int, ...], rule: TensorRule = RULE, name: str = "self_attn.attn"
) -> Comparison:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other[at] *= 2
    a, b = (folder / f"{side}-{'-'.join(map(str, shape))}.safetensors" for side in "ab")  # files stay open by their names
    for path, tensor in ((a, values), (b, other)):
        safetensors.torch.save_file({f"model.layers.3.{name}": tensor}, path)
    return diff_tensors(a, b, rule)


@pytest.mark.parametrize(
    ("shape", "at", "axes", "says"),
    [
        ((1, 16, 4, 64), (0, 9, 2), "", ", at [0, 9, 2] (--layout names the dimensions)."),
        ((1, 16, 4, 64), (0, 9, 2), "thd", ", at [0, 9, 2] (--layout names the dimensions)."),
        ((1, 16, 4, 64), (0, 9, 2), "bhtd", ", sequence 0, head 9, token 2."),
        ((1, 16, 4, 64), (0, 9, 2), "bthd", ", sequence 0, head 2, token 9."),
        ((2, 10, 16, 2, 64), (1, 3, 4, 1), "", ", at [1, 3, 4, 1] (--layout names the dimensions)."),
        ((16, 64), (9,), "", ", at [9]."), ((300,), (7,), "", ", at [7]."), ((), (), "", "."),
    ],
)  # fmt: skip
def test_a_place_is_an_index_unless_its_dimensions_are_named(
    tmp_path: Path, shape: tuple[int, ...], at: tuple[int, ...], axes: str, says: str
) -> None:
    result = one_wrong(tmp_path, shape, at, TensorRule(axes=axes))
    assert result.verdict == "regression", "the numbers differ, whatever the layout"
    assert say(*result.why).endswith(f"(self_attn.attn){says}")
    first = tensors(result).first
    assert first is not None
    assert first.index == at


def passes(folder: Path, values: Tensor, ends: tuple[int, ...]) -> Path:
    """A dump of hidden states, of which each pass holds some rows."""
    folder.mkdir()
    for step, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        rows = {f"model.layers.{layer}": values[:, start:end] + layer for layer in range(2)}
        safetensors.torch.save_file({name: row.contiguous() for name, row in rows.items()}, folder / f"pass_{step}.safetensors")
    return folder


def test_one_forward_is_compared_with_prefill_and_decode_row_by_row_in_order(tmp_path: Path) -> None:
    values = torch.randn(1, 13, 32, generator=torch.Generator().manual_seed(0))
    whole, steps = passes(tmp_path / "whole", values, (13,)), passes(tmp_path / "steps", values, (9, 10, 11, 12, 13))
    same = diff_tensors(whole, steps, RULE)
    assert (same.verdict, tensors(same).pairs, tensors(same).identical) == ("pass", 2, 2)
    assert same.why[1] == state("passes-in-order", a=1, b=5)

    values[0, 10] *= 1.5
    differ, joined = diff_tensors(whole, passes(tmp_path / "wrong", values, (9, 10, 11, 12, 13)), RULE).why
    assert (differ.values["layer"], differ.values["index"]) == (0, [0, 10])
    assert joined.id == "passes-in-order"

    short = diff_tensors(whole, passes(tmp_path / "short", values, (9, 10, 11)), RULE)
    assert short.verdict == "inconclusive"
    assert {line.id for line in tensors(short).not_compared} == {"rows-differ"}


_NUMBERS = itertools.count()


def _two(folder: Path, a: object, b: object, rule: TensorRule = RULE) -> Comparison:
    files = [folder / f"{next(_NUMBERS)}.pt" for _ in "ab"]  # the last files that were read stay open
    for file, held in zip(files, (a, b), strict=True):
        torch.save(held, file)
    return diff_tensors(*files, rule)


_NORMAL = torch.randn(64, 16, 64, generator=torch.Generator().manual_seed(0))
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.mark.parametrize("dtype", _FP8, ids=str)
@pytest.mark.parametrize("other", [None, torch.bfloat16], ids=["same", "bfloat16"])
@pytest.mark.parametrize("change", ["zeros", "random", 0.6, 1.05, "lost", "nan"])
def test_what_8_bits_do_not_explain_is_a_difference(
    tmp_path: Path, dtype: torch.dtype, other: torch.dtype | None, change: str | float
) -> None:
    wrong = _NORMAL.clone()
    if isinstance(change, float):
        wrong *= change
    elif change == "lost":
        wrong[3, 2, _NORMAL[3, 2].abs().argmin()] = 1.0
    else:
        wrong = {"zeros": torch.zeros_like, "random": torch.randn_like, "nan": lambda x: x * torch.nan}[change](wrong)
    result = _two(tmp_path, {"attn": _NORMAL.to(other or dtype)}, {"attn": wrong.to(dtype)})
    assert result.verdict == "regression"


@pytest.mark.parametrize("dtype", _FP8, ids=str)
def test_8_bits_explain_one_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    """What is stored of bfloat16, and of the same with another rounding before it; with one massive element in each row."""
    massive = _NORMAL.clone()
    massive[..., 7] *= 30
    for a in (_NORMAL, massive):
        noise = 1 + 2**-8 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1))
        stored = a.bfloat16().to(dtype)
        for b in (stored, (a * noise).bfloat16().to(dtype)):
            for first in (stored, a.bfloat16()):
                assert _two(tmp_path, {"attn": first}, {"attn": b}).verdict == "pass"


_COMPLEX = torch.polar(torch.ones(64, 32), torch.rand(64, 32, generator=torch.Generator().manual_seed(0)))
_ONES = torch.ones(4, 2, dtype=torch.uint8)
_HASHES = torch.full((100, 4), 1 << 60)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (_COMPLEX, _COMPLEX.conj().resolve_conj()),
        (_COMPLEX, _COMPLEX.real.contiguous()),
        (_HASHES, _HASHES + 1),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (0.125, 1.0),
        (3, 4),
        (2**70, 2**71),
        (_ONES.view(torch.float8_e8m0fnu), (_ONES + 1).view(torch.float8_e8m0fnu)),
        (_ONES.view(torch.float4_e2m1fn_x2), (_ONES + 1).view(torch.float4_e2m1fn_x2)),
    ],
    ids=["imaginary", "complex-real", "int64", "bool", "number", "integer", "large", "e8m0", "e2m1"],
)  # fmt: skip
def test_values_that_float64_or_reals_lack_are_compared(tmp_path: Path, a: object, b: object) -> None:
    assert _two(tmp_path, {"q": _NORMAL, "of": a}, {"q": _NORMAL, "of": b}).verdict == "regression"
    assert _two(tmp_path, {"q": _NORMAL, "of": a}, {"q": _NORMAL, "of": a}).verdict == "pass"


def test_names_that_are_one_after_flattening_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"two tensors named layer\.0\.attn"):
        _two(tmp_path, {"q": _NORMAL}, {"layer.0": {"attn": _NORMAL}, "layer": {"0.attn": _NORMAL}})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_compared_with_their_scales(tmp_path: Path) -> None:
    a = torch.quantize_per_tensor(_NORMAL, 0.1, 0, torch.qint8)
    b = torch._make_per_tensor_quantized_tensor(a.int_repr(), 0.7, 0)
    assert _two(tmp_path, {"w": a}, {"w": b}).verdict == "regression"
    assert _two(tmp_path, {"w": a}, {"w": a, "n": 1}).verdict == "inconclusive"


def test_nan_on_both_sides_is_no_pass(tmp_path: Path) -> None:
    none, row, rows = _NORMAL * torch.nan, _NORMAL.clone(), _NORMAL.clone()
    row[3] = torch.nan
    rows[..., 1:] = torch.nan
    result = _two(tmp_path, {"attn": none}, {"attn": none})
    says = "Nothing could be compared: NaN on both sides, which shows nothing, in 1,024 of 1,024 cells of attn."
    assert (result.verdict, say(*result.why)) == ("inconclusive", says)
    for mostly in (none, rows):
        assert _two(tmp_path, {"attn": mostly, "q": _NORMAL}, {"attn": mostly, "q": _NORMAL}).verdict == "inconclusive"
    result = _two(tmp_path, {"attn": row}, {"attn": row})
    assert (result.verdict, "in 16 of 1,024 cells of attn" in say(*result.why)) == ("pass", True)


def test_files_that_are_not_read_are_no_pass_where_they_differ(tmp_path: Path) -> None:
    for side in "ab":
        (tmp_path / side).mkdir()
        safetensors.torch.save_file({"attn": _NORMAL}, tmp_path / side / "pass_0.safetensors")
        (tmp_path / side / "same.pkl").write_bytes(b"same")
        (tmp_path / side / "run.log").write_text(side)
    assert diff_tensors(tmp_path / "a", tmp_path / "b", RULE).verdict == "pass"
    for side in "ab":
        (tmp_path / side / "pass_1.npy.gz").write_bytes(side.encode())
    (tmp_path / "b" / "pass_2.pkl").write_bytes(b"")
    result = diff_tensors(tmp_path / "a", tmp_path / "b", RULE)
    assert (result.verdict, list(map(say, tensors(result).not_compared))) == (
        "inconclusive",
        ["not read, and not the same: pass_1.npy.gz", "not read, and only in B: pass_2.pkl"],
    )


def test_a_factor_that_no_row_shows_is_seen_in_the_whole(tmp_path: Path) -> None:
    a, b = (each.to(torch.float8_e4m3fn) for each in (_NORMAL, _NORMAL * 1.03))
    (row,) = tensors(_two(tmp_path, {"attn": a}, {"attn": b})).tensors
    assert row.out_of_bounds > row.cells // 2


def _hidden(dtype: torch.dtype) -> Tensor:
    """A residual stream of 64 tokens with two massive dimensions."""
    made = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    made[:, [141, 253]] = torch.tensor([150.0, -120.0])
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("change", ["factor", "dims", "head"])
def test_what_is_small_in_each_row_is_seen_in_all_of_them(tmp_path: Path, dtype: torch.dtype, change: str) -> None:
    a = _hidden(dtype)
    b = a.clone()
    if change == "factor":  # 1.02 in bfloat16
        b = (a.double() * (1 + 2.5 * _rounding(dtype))).to(dtype)
    elif change == "dims":
        b[:, 64:96] = 0
    else:  # of a flat output
        a[:, 128:192] *= 0.02
        b = a.clone()
        b[:, 128:192] = 0
    result = _two(tmp_path, {"h": a}, {"h": b})
    assert (result.verdict, tensors(result).tensors[0].out_of_bounds) == ("regression", 64)
    assert _two(tmp_path, {"h": a}, {"h": b}, TensorRule(tolerance=2.0)).verdict == "pass", "as it was asked for"


def test_a_quiet_dimension_of_other_numbers_is_seen_in_a_few_tokens(tmp_path: Path) -> None:
    a = _hidden(torch.bfloat16)[:24]
    b = a.clone()
    b[:, 7] = torch.randn(24, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert _two(tmp_path, {"h": a}, {"h": b}).verdict == "regression"
    assert _two(tmp_path, {"h": a[:15]}, {"h": b[:15]}).verdict == "pass", "which fewer do not show"


def _rounding(dtype: torch.dtype) -> float:
    """What one rounding explains; of float32, the sum of some thousand terms."""
    return torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 15, 64])
def test_rounding_of_quiet_and_massive_dimensions_is_no_difference(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    a = _hidden(torch.float64)[:tokens] * torch.randn(512, generator=generator).exp()
    noise = 1 + torch.finfo(dtype).eps * torch.randn(a.shape, generator=generator)
    assert _two(tmp_path, {"h": a.to(dtype)}, {"h": (a * noise).to(dtype)}).verdict == "pass"


def test_bytes_of_a_cache_are_8_bit_floats_and_others_are_not(tmp_path: Path) -> None:
    noise = 1 + 2**-9 * torch.randn(_NORMAL.shape, generator=torch.Generator().manual_seed(1))
    a, b = ((_NORMAL * each).to(torch.float8_e4m3fn).view(torch.uint8) for each in (1.0, noise))
    assert not torch.equal(a, b)
    for name in ("layers.0.k_cache", "layers.0.self_attn.kv_cache", "value_cache.3"):
        assert _two(tmp_path, {name: a}, {name: b}).verdict == "pass"
        assert _two(tmp_path, {name: a}, {name: a.roll(1)}).verdict == "regression"
    assert _two(tmp_path, {"mask": a}, {"mask": b}).verdict == "regression"
    assert _two(tmp_path, {"k_cache": a}, {"k_cache": b}, TensorRule(tolerance=0)).verdict == "regression"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_was_saved_wider_has_the_bound_of_its_own_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    noise = 1 + 0.3 * torch.finfo(dtype).eps * torch.randn(_NORMAL.shape, generator=torch.Generator().manual_seed(1))
    a, b = ((_NORMAL * each).to(dtype).float() for each in (1.0, noise))
    assert _two(tmp_path, {"attn": a}, {"attn": b}).verdict == "pass"
    assert _two(tmp_path, {"attn": _NORMAL}, {"attn": _NORMAL * noise}).verdict == "regression"
    ones = torch.ones(64, 64)
    assert _two(tmp_path, {"norm": ones}, {"norm": ones + 2**-7}).verdict == "regression", "which any dtype holds"
