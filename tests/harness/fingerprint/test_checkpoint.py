"""A model's parameters beside its checkpoint: what was not delivered is named, and what engines do to weights is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import Fingerprint, Weight
from assay.harness.fingerprint.checkpoint import beside_checkpoint, checkpoint_weights
from assay.harness.fingerprint.parts import faults
from assay.harness.fingerprint.weights import describe_weight, joined
from tests.harness.fingerprint.models import random_weights, write_model

Tensors = dict[str, Tensor]
QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"


def described(weights: Tensors) -> tuple[Weight, ...]:
    return tuple(describe_weight(name, weight) for name, weight in weights.items())


def fused(weights: Tensors) -> Tensors:
    """Return what an engine loads."""
    made = dict(weights)
    for number in range(2):
        at = f"model.layers.{number}"
        made[f"{at}.self_attn.qkv_proj.weight"] = torch.cat([made.pop(f"{at}.self_attn.{x}_proj.weight") for x in "qkv"])
        made[f"{at}.mlp.gate_up_proj.weight"] = torch.cat([made.pop(f"{at}.mlp.{x}_proj.weight") for x in ("gate", "up")])
    return made


def wrong(loaded: tuple[Weight, ...], stored: Tensors) -> list[str]:
    beside = beside_checkpoint(loaded, described(stored))
    return [fault.says for fault in faults(Fingerprint(source="server", engine="e", model="m", weights=beside))]


def dropped(*names: str) -> Tensors:
    return {name: weight for name, weight in random_weights().items() if name not in names}


@pytest.mark.parametrize(
    ("lost", "loaded"),
    [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.layers.1.self_attn.q_proj.weight", QKV),
        ("model.layers.1.mlp.up_proj.weight", GATE_UP),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_that_the_checkpoint_lacks_is_named(lost: str, loaded: str) -> None:
    served = described(fused(random_weights()))
    assert wrong(served, dropped(lost)) == [f"{loaded} is served, but missing from the checkpoint, wholly or in part"]


@pytest.mark.parametrize("name", [QKV, GATE_UP, "model.layers.0.mlp.down_proj.weight"])
def test_other_values_are_named_where_the_engine_fuses_too(name: str) -> None:
    served = fused(random_weights())
    served[name] = 1.05 * served[name]
    assert wrong(described(served), random_weights()) == [f"{name} is different from the checkpoint"]


def sharded(weights: Tensors) -> tuple[Weight, ...]:
    ranks = [{name: weight.chunk(2)[rank] if weight.dim() > 1 else weight for name, weight in weights.items()} for rank in range(2)]
    return joined([Fingerprint(source="server", engine="e", model="m", weights=described(rank)) for rank in ranks]).weights or ()


HONEST: dict[str, Callable[[], tuple[tuple[Weight, ...], Tensors]]] = {
    "fused": lambda: (described(fused(random_weights())), random_weights()),
    "as stored": lambda: (described(random_weights()), random_weights()),
    "sharded": lambda: (sharded(fused(random_weights())), random_weights()),
    "rounded": lambda: (described({n: w.bfloat16() for n, w in fused(random_weights()).items()}), random_weights()),
    "sharded and rounded": lambda: (sharded({n: w.half() for n, w in fused(random_weights()).items()}), random_weights()),
    "tied": lambda: (described(fused(dropped("lm_head.weight"))), dropped("lm_head.weight")),
    "tied by a copy": lambda: (
        described(fused(random_weights()) | {"lm_head.weight": random_weights()["model.embed_tokens.weight"]}),
        dropped("lm_head.weight"),
    ),
    "padded": lambda: (
        described(
            fused(random_weights())
            | {"lm_head.weight": torch.cat([random_weights()["lm_head.weight"], torch.zeros(40, 64)])}
        ),
        random_weights(),
    ),
    "quantised by the engine": lambda: (
        described({n: (8 * w).to(torch.float8_e4m3fn) if "_proj" in n else w for n, w in fused(random_weights()).items()}
                  | {f"model.layers.{n}.mlp.gate_up_proj.weight_scale": torch.tensor(0.125) for n in range(2)}),
        random_weights(),
    ),
    "transposed in place": lambda: (
        described({n: w.t().contiguous() if "o_proj" in n else w for n, w in fused(random_weights()).items()}),
        random_weights(),
    ),
    "under another name": lambda: (
        described(fused(random_weights())),
        {n.replace("model.norm", "model.final_layernorm"): w for n, w in random_weights().items()},
    ),
    "scales of a KV cache": lambda: (
        described(fused(random_weights()) | {"model.layers.0.self_attn.attn.k_scale": torch.tensor(1.0)}),
        random_weights(),
    ),
    "in the shell of another model": lambda: (
        described(fused(random_weights())),
        {n.replace("model.", "model.language_model.", 1): w for n, w in random_weights().items()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HONEST)
def test_what_engines_do_to_weights_is_not_wrong(case: str) -> None:
    loaded, stored = HONEST[case]()
    assert wrong(loaded, stored) == []


def test_layers_of_another_kind_without_a_part_are_not_wrong() -> None:
    """The last layers of some models take K and V of others: more than a few of one name have none."""
    weights = {f"model.layers.{n}.self_attn.{x}_proj.weight": torch.randn(64, 64) for n in range(6) for x in "qkv"}
    loaded = {
        f"model.layers.{n}.self_attn.qkv_proj.weight": torch.cat(
            [weights[f"model.layers.{n}.self_attn.{x}_proj.weight"] for x in "qkv"]
        )
        for n in range(6)
    }
    stored = {n: w for n, w in weights.items() if "q_proj" in n or not n.startswith(("model.layers.4", "model.layers.5"))}
    assert wrong(described(loaded), stored) == []
    del stored["model.layers.4.self_attn.q_proj.weight"]
    del stored["model.layers.5.self_attn.q_proj.weight"]
    assert wrong(described(loaded), stored) == []


def test_a_checkpoint_is_read_as_it_is_stored(tmp_path: Path) -> None:
    assert {weight.name for weight in checkpoint_weights(write_model(tmp_path, {}))} == random_weights().keys()


def written(folder: Path, files: dict[str, Tensors], index: dict[str, str] | None = None, suffix: str = "safetensors") -> Path:
    """A folder with these files of weights, and an index that names the file of each."""
    folder.mkdir()
    for name, weights in files.items():
        if suffix == "bin":
            torch.save(weights, folder / name)
        else:
            save_file(weights, folder / name)
    if index is not None:
        (folder / f"model.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def read(folder: Path) -> dict[str, str]:
    weights = checkpoint_weights(folder)
    assert len({weight.name for weight in weights}) == len(weights)
    return {weight.name: weight.digest for weight in weights}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_of_several_files_those_of_the_index_are_read(tmp_path: Path, suffix: str) -> None:
    weights = random_weights()
    old = {name: weight + 1 for name, weight in weights.items()}
    whole = read(written(tmp_path / "whole", {f"pytorch_model.{suffix}": weights}, suffix=suffix))
    assert whole == read(write_model(tmp_path / "model", {}))
    one, two = (dict(list(weights.items())[half::2]) for half in (0, 1))
    names = {f"part-{number}.{suffix}": part for number, part in enumerate((one, two))}
    index = {name: file for file, part in names.items() for name in part}
    assert read(written(tmp_path / "parts", names, index, suffix)) == whole
    assert read(written(tmp_path / "left", {**names, f"pytorch_model_old.{suffix}": old}, index, suffix)) == whole
    both = {f"part-0.{suffix}": one | {next(iter(two)): old[next(iter(two))]}, f"part-1.{suffix}": two}
    assert read(written(tmp_path / "both", both, index, suffix)) == whole, "each from its own file"
    with pytest.raises(EvidenceError, match=r"part-1.* does not exist"):
        read(written(tmp_path / "lost", {f"part-0.{suffix}": one}, index, suffix))


def test_two_checkpoints_in_a_folder_and_damaged_files_are_refused(tmp_path: Path) -> None:
    weights = random_weights()
    index = dict.fromkeys(weights, "part.safetensors")
    with pytest.raises(EvidenceError, match=r"does not name model\.safetensors"):
        read(written(tmp_path / "two", {"part.safetensors": weights, "model.safetensors": weights}, index))
    folder = written(tmp_path / "bin", {"pytorch_model.bin": weights}, suffix="bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:5000])
    with pytest.raises(EvidenceError, match=r"pytorch_model\.bin"):
        read(folder)
