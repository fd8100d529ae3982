"""Parameters of SGLang's own layers, shared by ranks in every way, are the same as in one process; any other order is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("sglang") is None:  # which takes seconds to import
    pytest.skip("needs SGLang", allow_module_level=True)

from assay.harness.engines.sglang.launch import STAND_INS
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.fingerprint.checkpoint import _described_part
from assay.harness.fingerprint.differences import FingerprintDiff, compare_fingerprints
from assay.harness.fingerprint.weight_places import place_of
from assay.harness.fingerprint.weights import WeightPlace, describe_weight, joined
from tests.harness.fingerprint.sharded_layers import ARRANGEMENTS, LAYERS, wholes

ROOT = Path(__file__).parents[3]
SHARED = [arrangement for arrangement in ARRANGEMENTS if arrangement != "tp 1"]
Held = Mapping[str, tuple[Tensor, WeightPlace | None]]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank holds of SGLang's own layers, see `tests.harness.fingerprint.sharded_layers`."""
    out = tmp_path_factory.mktemp("layers") / "layers.pt"
    paths = os.pathsep.join([str(ROOT), str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"}
    script = Path(__file__).with_name("sharded_layers.py")
    subprocess.run([sys.executable, str(script), str(out)], env=environment, check=True, capture_output=True, timeout=300)
    return torch.load(out, weights_only=False)


def served(layer: str, ranks: Sequence[Held]) -> Fingerprint:
    """Return the fingerprint of a server whose ranks hold these parameters of one layer."""
    made = []
    for held in ranks:
        weights = [describe_weight(f"{layer}.{name}", tensor, place=place) for name, (tensor, place) in held.items()]
        made.append(Fingerprint(source="server", engine="e", model="m", weights=tuple(weights)))
    return joined(made)


def diff(left: Fingerprint, right: Fingerprint) -> FingerprintDiff:
    return compare_fingerprints(left, right)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("arrangement", SHARED)
def test_what_ranks_share_is_what_one_process_holds(layers: Any, layer: str, arrangement: str) -> None:
    one, several = (served(layer, layers["same"][layer][each]) for each in ("tp 1", arrangement))
    compared = diff(one, several)
    assert compared.differences == ()
    assert compared.not_compared.get("weights.order") is None, "all places are known"
    for ours, theirs in zip(one.weights or (), several.weights or (), strict=True):
        assert theirs.projections == pytest.approx(ours.projections, abs=1e-4)
        assert theirs.sums == pytest.approx(ours.sums, rel=1e-6, abs=1e-4)
        assert theirs.whole == ours.shape
        assert theirs.held == ()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("arrangement", [*SHARED, "tp 1"])
@pytest.mark.parametrize("variant", ["rows", "columns"])
def test_another_order_of_rows_or_columns_is_seen(layers: Any, layer: str, arrangement: str, variant: str) -> None:
    one, several = served(layer, layers["same"][layer]["tp 1"]), served(layer, layers[variant][layer][arrangement])
    vectors = sum(len(each.shape) < 2 for each in one.weights or ())
    changed = len(one.weights or ()) - (vectors if variant == "columns" else 0)
    found = diff(one, several)
    assert [difference.name for difference in found.differences] == (["weights.order"] if changed else [])
    if changed:
        assert found.differences[0].says.startswith(f"{changed} of {len(one.weights or ())} parameter")
        assert "the same numbers in another order" in found.differences[0].says


def test_a_checkpoint_has_what_ranks_share(layers: Any) -> None:
    """Parts that the engine fuses are at their place in the fused parameter."""
    stored = wholes()
    shapes = {name: tuple(each.shape) for name, each in stored.items()}
    files = Fingerprint(
        source="files", engine="e", model="m", weights=tuple(_described_part(name, each, shapes) for name, each in stored.items())
    )
    for variant, expected in (("same", []), ("rows", ["weights.order"]), ("columns", ["weights.order"])):
        for arrangement in ARRANGEMENTS:
            weights = [each for layer in LAYERS for each in served(layer, layers[variant][layer][arrangement]).weights or ()]
            found = diff(files, Fingerprint(source="server", engine="e", model="m", weights=tuple(weights)))
            assert [difference.name for difference in found.differences] == expected
            assert "weights.order" not in found.not_compared


def stand_in(kind: str, method: str, **attributes: Any) -> Any:
    """Return a layer of a class of SGLang's that loads its parameter ``w2_weight`` or ``weight`` itself, as rank 1 of 2."""

    def weight_loader(self: Any, parameter: Any, loaded: Any) -> None: ...

    weight_loader.__module__ = "sglang.srt.layers.linear"
    made = type(kind, (torch.nn.Module,), {"__module__": "sglang.srt.layers.linear", "weight_loader": weight_loader})
    layer: Any = made()
    layer.tp_group = SimpleNamespace(rank_in_group=1, world_size=2)
    layer.quant_method = type(method, (), {})()
    for name, value in attributes.items():
        setattr(layer, name, torch.nn.Parameter(value) if isinstance(value, Tensor) else value)
    for parameter in layer.parameters():
        parameter.weight_loader = layer.weight_loader
    return layer


def row_parallel() -> Any:
    return stand_in("RowParallelLinear", "UnquantizedLinearMethod", weight=torch.zeros(4, 6))


@pytest.mark.parametrize(
    "changed",
    [
        {"quant_method": SimpleNamespace()},
        {"use_intel_amx_backend": True},
        {"use_presharded_weights": True},
        {"weight_loader": lambda parameter, loaded: None},
        {"weight_loader": row_parallel().weight_loader},
    ],
)
def test_what_a_layer_does_not_load_itself_or_packs_has_no_place(changed: dict[str, Any]) -> None:
    layer = row_parallel()
    place = place_of(layer, "weight", layer.weight, True)
    assert place is not None
    assert (place.whole, place.pieces[0].column) == ((4, 12), 6)
    for name, value in changed.items():
        setattr(layer.weight if name == "weight_loader" else layer, name, value)
    assert place_of(layer, "weight", layer.weight, True) is None


def test_experts_that_a_map_moved_have_no_place() -> None:
    at = {"moe_tp_rank": 0, "moe_tp_size": 1, "moe_ep_rank": 1, "moe_ep_size": 2}
    layer = stand_in("FusedMoE", "UnquantizedFusedMoEMethod", w2_weight=torch.zeros(2, 3, 4), **at)
    place = place_of(layer, "w2_weight", layer.w2_weight, True)
    assert place is not None
    assert (place.whole, place.pieces[0].rows) == ((4, 3, 4), ((6, 6),))
    assert place_of(layer, "w2_weight", layer.w2_weight, False) is None
    layer.quant_method.w13_swiglu_interleaved = True
    assert place_of(layer, "w2_weight", layer.w2_weight, True) is None
