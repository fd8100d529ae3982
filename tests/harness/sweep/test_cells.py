"""A sweep's cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from assay.harness.errors import UsageError
from assay.harness.sweep.cells import Option, SweepCell, SweepPlan, plan
from assay.harness.sweep.spec import SweepSpec, Value

CHECK = {
    "candidate": Option("", required=True),
    "size": Option("--size"),
    "dtype": Option("--dtype", "repeated"),
    "seed": Option("--seed"),
}
REPLAY = {"pack": Option("", required=True), "candidate": Option("--candidate", required=True)}
RUN = {"candidate": Option("--candidate"), "model": Option("--model"), "seed": Option("--seed")}
RECORD = {"pack": Option("", required=True), "candidate": Option("--candidate"), "model": Option("--model")}
BENCH = {
    "fault": Option("--fault"),
    "read_out": Option("--read-out", "switch"),
    "graphs": Option("--graphs", "switch", "--no-graphs"),
}
OPTIONS = {"check": CHECK, "replay": REPLAY, "run": RUN, "record": RECORD, "bench": BENCH}


def planned(code: str = "1", **given: Any) -> SweepPlan:
    def identify(taken: Mapping[str, Value], accelerator: str) -> dict[str, str]:
        return {"code": code, "device": accelerator or "cpu"}

    return plan(SweepSpec(**given), OPTIONS, identify)


def commands(made: SweepPlan) -> list[str]:
    return [" ".join(cell.command) for cell in made.cells.values()]


def test_a_cell_is_a_command_line() -> None:
    made = planned(command="check", axes={"candidate": ["a:f", "b:f"], "dtype": [["float16", "float32"]]}, set={"size": "full"})
    assert commands(made) == [
        "check --size=full --dtype=float16 --dtype=float32 a:f", "check --size=full --dtype=float16 --dtype=float32 b:f",
    ]  # fmt: skip
    assert [dict(cell.axes) for cell in made.cells.values()] == [
        {"candidate": "a:f", "dtype": "float16,float32"}, {"candidate": "b:f", "dtype": "float16,float32"},
    ]  # fmt: skip


def test_switches_are_on_or_off() -> None:
    made = planned(command="bench", axes={"read_out": [True, False], "graphs": [True, False]})
    assert commands(made) == [
        "bench --read-out --graphs", "bench --read-out --no-graphs", "bench --graphs", "bench --no-graphs",
    ]  # fmt: skip


def test_exclusions_leave_out_what_has_all_of_their_values() -> None:
    axes = {"candidate": ["a:f", "b:f"], "seed": [0, 1]}
    made = planned(command="check", axes=axes, exclude=[{"candidate": "a:f", "seed": 1}])
    assert commands(made) == ["check --seed=0 a:f", "check --seed=0 b:f", "check --seed=1 b:f"]


def only(made: SweepPlan) -> SweepCell:
    (cell,) = made.cells.values()
    return cell


def test_a_key_holds_what_decides_a_cell_and_nothing_else() -> None:
    first = only(planned(command="check", axes={"candidate": ["a:f"]}, set={"size": "full"})).key
    assert only(planned(command="check", axes={"candidate": ["a:f"], "size": ["full"]})).key == first
    others = [
        planned(command="check", axes={"candidate": ["a:f"]}),
        planned(command="check", axes={"candidate": ["b:f"]}, set={"size": "full"}),
        planned("2", command="check", axes={"candidate": ["a:f"]}, set={"size": "full"}),
        planned(command="check", axes={"candidate": ["a:f"], "accelerator": ["L4"]}, set={"size": "full"}),
    ]
    assert len({first, *(only(made).key for made in others)}) == 5


def test_limits_do_not_decide_a_cell() -> None:
    made = [planned(command="check", axes={"candidate": ["a:f"]}, limits={"minutes": minutes}) for minutes in (1, 2)]
    assert only(made[0]).key == only(made[1]).key


def test_stages_share_cells_and_replay_one_pack_for_each_model() -> None:
    made = planned(stages=["check", "replay", "run"], axes={"model": ["m1", "m2"], "candidate": ["a:f", "b:f", "triton"]})
    honest = "torch.nn.functional:scaled_dot_product_attention"
    assert commands(made) == [
        f"record --candidate={honest} --model=m1", f"record --candidate={honest} --model=m2",
        "check a:f", "check b:f", "check sglang:triton",
        "replay --candidate=a:f", "replay --candidate=b:f", "replay --candidate=sglang:triton",
        "replay --candidate=a:f", "replay --candidate=b:f", "replay --candidate=sglang:triton",
        "run --candidate=a:f --model=m1", "run --candidate=b:f --model=m1", "run --candidate=triton --model=m1",
        "run --candidate=a:f --model=m2", "run --candidate=b:f --model=m2", "run --candidate=triton --model=m2",
    ]  # fmt: skip
    assert [cell.axes["model"] for cell in made.cells.values() if cell.command[0] == "replay"] == ["m1"] * 3 + ["m2"] * 3
    packs = [cell.key for cell in made.cells.values() if cell.command[0] == "record"]
    assert [made.cells[cell.pack].axes["model"] for cell in made.cells.values() if cell.pack] == ["m1"] * 3 + ["m2"] * 3
    assert packs == list(dict.fromkeys(cell.pack for cell in made.cells.values() if cell.pack))
    assert [[cell.command[0] for cell in one.cells] for one in made.combinations] == [["check", "replay", "run"]] * 6


@pytest.mark.parametrize(
    ("given", "found", "do"),
    [
        (
            {"command": "check", "axes": {"candidate": ["a:f"], "model": ["m"]}},
            "The axis model is no option of assay check.",
            "see",
        ),
        ({"command": "run", "axes": {"modle": ["m"]}}, "The axis modle is no option of assay run.", "model"),
        ({"command": "run", "axes": {"model": ["m"]}, "set": {"sede": 1}}, "The constant sede is no option of assay run.", "seed"),
        ({"command": "check", "axes": {"size": ["small"]}}, "assay check needs candidate", "--set candidate=A,B"),
        ({"command": "replay", "axes": {"candidate": ["a:f"]}}, "assay replay needs pack", "--set pack=A,B"),
    ],
)
def test_what_no_command_takes_or_one_lacks_is_refused(given: dict[str, Any], found: str, do: str) -> None:
    with pytest.raises(UsageError) as error:
        planned(**given)
    assert error.value.found.startswith(found)
    assert do in error.value.do
