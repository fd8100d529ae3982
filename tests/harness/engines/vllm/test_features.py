"""vLLM's features, beside the installed vLLM: every argument that they name is one that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from assay.harness.engines import registry
from assay.harness.engines.vllm.features import features_of
from assay.harness.judge.invariance_arms import clashes, closed, pairs

FEATURES = features_of("cuda")
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def source() -> Path:
    """The folder of vLLM's source."""
    folders = list((ROOT / ".nox/vllm/lib").glob("python3*/site-packages/vllm"))
    if not folders:
        pytest.skip("vLLM's own environment does not exist")
    return folders[0]


@pytest.mark.parametrize("id_", FEATURES)
def test_a_feature_names_what_vllm_has(id_: str, source: Path) -> None:
    feature = FEATURES[id_]
    known = (source / "engine/arg_utils.py").read_text()
    for flag in (*feature.on, *feature.off):
        assert flag.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") in known
    for name in feature.resolved:
        section, _, field = name.partition(".")
        config = (source / f"config/{section.removesuffix('_config')}.py").read_text()
        assert re.search(rf"(?m)^    {field}: ", config), name


@pytest.mark.parametrize("id_", FEATURES)
def test_a_feature_can_be_on_with_what_it_requires(id_: str) -> None:
    assert not clashes(closed([id_], FEATURES), FEATURES)


def test_on_a_cpu_all_but_one_are_on_in_some_variant() -> None:
    here = {id_: each for id_, each in features_of("cpu").items() if not each.unavailable("cpu", 0, {})}
    assert set(FEATURES) - set(here) == {"async-scheduling"}
    assert set().union(*pairs(here)) == set(here)


def test_an_engine_without_features_is_not_probed() -> None:
    assert registry.probed("vllm")
    assert not registry.probed("inside")  # type: ignore[arg-type]
