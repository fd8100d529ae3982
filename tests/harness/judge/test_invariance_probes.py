from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from assay.evals.invariance_load import probe_load
from assay.harness.evidence.invariance import InvarianceFolder, InvarianceManifest
from assay.harness.judge.probe_scores import Bound, Measure, changed_probes, in_common


@pytest.fixture
def manifest(arm_records: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> InvarianceManifest:
    """The plan of the CPU's probes."""
    folder = InvarianceFolder.new(tmp_path_factory.mktemp("plan") / "out")
    probes = probe_load("cpu", 4096, 97).probes
    arm_records.write(folder, [], lengths={probe.id: (len(probe.ids), probe.shared, probe.depth) for probe in probes})
    return folder.manifest()


@pytest.mark.parametrize(
    ("has", "says"),
    [
        (lambda prompt, shared, depth: shared > 0, ", those with a shared prefix"),
        (lambda prompt, shared, depth: prompt % 16 > 0, ", those that end inside a page of 16"),
        (lambda prompt, shared, depth: depth == 64, ", those with 64 generated tokens"),
        (
            lambda prompt, shared, depth: shared > 0 and prompt - shared > 128,
            ", those with a shared prefix and with more than 128 new tokens",
        ),
        (lambda prompt, shared, depth: prompt in (3, 17, 136), ""),
        (lambda prompt, shared, depth: prompt == 3, ""),
        (lambda prompt, shared, depth: True, ""),
    ],
    ids=["prefix", "page", "depth", "two", "nothing", "one probe", "all"],
)
def test_what_the_probes_that_differ_alone_have_in_common(
    manifest: InvarianceManifest, has: Callable[[int, int, int], bool], says: str
) -> None:
    changed = [probe for probe, length in manifest.lengths.items() if has(*length)]
    assert in_common(changed, manifest) == f"in {len(changed)} of {len(manifest.lengths)} probes{says}"


def test_nothing_is_said_where_no_probe_differs(manifest: InvarianceManifest) -> None:
    assert in_common([], manifest) == ""


def test_probes_with_a_position_out_of_bounds_differ(arm_records: ModuleType) -> None:
    limits: dict[Measure, Bound] = dict.fromkeys(("prefill", "decode"), Bound(1e-3, 1e-2))  # type: ignore[arg-type]
    other = [arm_records.reply("0+8"), arm_records.reply("1+8", decode=0.5), arm_records.reply("2+8", prefill=0.5)]
    assert changed_probes(arm_records.BASE.replies, other, limits) == ["1+8", "2+8"]
    assert changed_probes(arm_records.BASE.replies, [arm_records.reply("0+8", decode=0.01)], limits) == []
