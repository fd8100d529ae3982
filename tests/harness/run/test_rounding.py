"""The cost of a declared rounding, in another implementation: measured on the tiny model, and when nothing is measured."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from assay.evals.probes import probe_load
from assay.harness.engines.model import resolve_model
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ROUNDING
from assay.harness.judge.noise_limits import EXACT_KL, kl_limit, measured_noise
from assay.harness.progress import ProgressDisplay
from assay.harness.run import rounding
from assay.harness.run.plan import Plan, prepare

MODEL = resolve_model("tiny", ())
IDS = [probe.ids for probe in probe_load("cpu", 4096, 1031).probes if len(probe.ids) < 20]


def mean(given: dict[str, str]) -> float:
    every = [value for each in rounding.divergences_of(MODEL, IDS, given) for value in each]
    return sum(every) / len(every)


def test_fewer_bits_cost_more() -> None:
    costs = [mean(each) for each in ({"activations": "float32"}, {"activations": "float16"}, {"activations": "bfloat16"})]
    assert costs[0] < 1e-9 < costs[1] < 1e-4 < costs[2] < 1e-2
    assert mean({"weights": "float8_e4m3fn"}) > mean({"layers": "fp8"}) > mean({"layers": "w8a8_int8"}) > 1e-5
    assert mean({"weights": "bfloat16"}) == 0.0, "its weights are stored so"


def test_a_measured_rounding_allows_four_times_its_cost() -> None:
    name = measured_noise("activations in bfloat16", 4.5e-4)
    assert name == "activations in bfloat16 (measured: 0.00045 nats)"
    assert kl_limit([name]) == pytest.approx(EXACT_KL + 4 * 4.5e-4)


@pytest.fixture
def run(tmp_path: Path, runs: ModuleType) -> Any:
    def measured(models: tuple[Path, Path] = (MODEL, MODEL), **arguments: tuple[str, str]) -> RunFolder:
        folder = runs.run_of(tmp_path, spec := runs.spec_of("torch_native"))
        progress = folder.progress()
        servers = tuple(
            server.model_copy(update={"arguments": {**server.arguments, **{name: of[n] for name, of in arguments.items()}}})
            for n, server in enumerate(progress.servers)
        )
        folder.update(progress.model_copy(update={"servers": servers}))
        made = prepare(spec)
        plan = Plan(made.spec, {"reference": models[0], "candidate": models[1]}, (), made.reference, made.candidate)
        rounding.measure_rounding(plan, folder, ProgressDisplay(Console(quiet=True)))
        return folder

    return measured


def stored(folder: Path, dtype: torch.dtype) -> Path:
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.suffix == ".safetensors":
            save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, folder / file.name, {"format": "pt"})
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_run_of_equal_dtypes_declares_nothing(run: Any) -> None:
    assert run(dtype=("float32", "float32")).read(ROUNDING) is None


def test_another_dtype_of_the_activations_is_measured(run: Any) -> None:
    made = run(dtype=("float32", "bfloat16")).read(ROUNDING)
    assert made is not None
    assert made.declared == "activations in bfloat16"
    assert made.mean == pytest.approx(4.6e-4, rel=0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize("finer", [0, 1], ids=["the reference's", "the candidate's"])
def test_weights_in_fewer_bits_are_rounded_from_those_with_more(
    run: Any, tmp_path_factory: pytest.TempPathFactory, finer: int
) -> None:
    models = [MODEL, stored(tmp_path_factory.mktemp("models") / "fine", torch.float32)]
    made = run((models[1 - finer], models[finer]), dtype=("float32", "float32")).read(ROUNDING)
    assert made is not None
    assert made.declared == "weights in bfloat16"


def test_what_no_independent_path_computes_is_said(run: Any) -> None:
    made = run(quantization=("", "awq")).read(ROUNDING)
    assert made is not None
    assert (made.mean, made.not_measured) == (None, "assay does not compute awq by itself")


def test_a_checkpoint_in_integers_is_not_computed(run: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = run((MODEL, stored(tmp_path_factory.mktemp("models") / "coarse", torch.int8))).read(ROUNDING)
    assert made is not None
    assert (made.declared, made.not_measured) == ("weights in I8", "assay does not compute I8 by itself")


def test_a_large_model_is_not_computed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_MOST_BYTES", 1)
    made = run(dtype=("float32", "bfloat16")).read(ROUNDING)
    assert made is not None
    assert made.mean is None
    assert "models of at most" in made.not_measured
