"""The features, beside the installed SGLang: every name that they and the hooks of the plugin use is one that it has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from assay.harness.engines.sglang import forcing
from assay.harness.engines.sglang.features import features_of
from assay.harness.judge.invariance_arms import clashes, closed

FEATURES = features_of("cuda")
_HOOKED = re.compile(r"\"(sglang\.[\w.]+)\"")


@pytest.fixture(scope="module")
def source() -> Path:
    """The folder of SGLang's source."""
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def arguments(source: Path) -> set[str]:
    """The names of its arguments: in one module up to 0.5.17, in one for each group later."""
    files = [source / "srt/server_args.py", *(source / "srt/arg_groups").rglob("*.py")]
    return {name for file in files for name in re.findall(r"(?m)^    (\w+): A\[", file.read_text())}


@pytest.mark.parametrize("id_", FEATURES)
def test_a_feature_names_what_sglang_has(id_: str, source: Path, arguments: set[str]) -> None:
    feature = FEATURES[id_]
    flags = [flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in (*feature.on, *feature.off)]
    assert arguments.issuperset({*flags, *feature.resolved})
    variables = set(re.findall(r"(?m)^    (\w+) = Env", (source / "srt/environ.py").read_text()))
    assert variables.issuperset(feature.environment)


def hooked() -> Iterator[str]:
    for file in (Path(forcing.__file__), Path("tests/stand_ins/faulty_scheduler/faulty_scheduler.py")):
        yield from _HOOKED.findall(file.read_text())


@pytest.mark.parametrize("target", sorted(set(hooked())))
def test_what_is_hooked_is_there(target: str, source: Path) -> None:
    *path, kind, method = target.removeprefix("sglang.").split(".")
    tree = ast.parse((source.joinpath(*path).with_suffix(".py")).read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind]
    assert [node for of in classes for node in of.body if isinstance(node, ast.FunctionDef) and node.name == method]


@pytest.mark.parametrize("id_", FEATURES)
def test_a_feature_can_be_on_with_what_it_requires(id_: str) -> None:
    assert not clashes(closed([id_], FEATURES), FEATURES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ngram", "page-size"), ("deterministic", "chunked-prefill"), ("deterministic", "attention-backend"),
        ("dp-attention", "prefix-cache"), ("dp-attention", "chunked-prefill"), ("dp-attention", "draft-model"),
        ("dp-attention", "ngram"), ("zero-lora", "eagle"), ("zero-lora", "draft-model"), ("zero-lora", "weights-again"),
        ("eagle", "weights-again"), ("expert-parallel", "tensor-parallel"),
    ],
)  # fmt: skip
def test_what_sglang_refuses_together_is_never_on_together(one: str, other: str) -> None:
    assert clashes((one, other), FEATURES)


@pytest.mark.parametrize(
    ("id_", "config", "why"),
    [
        ("expert-parallel", {"num_experts": 4}, ""),
        ("expert-parallel", {}, "the model has no experts"),
        ("dp-attention", {"architectures": ["Qwen3ForCausalLM"]}, ""),
        ("dp-attention", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM shares every layer among all GPUs"),
        ("eagle", {"architectures": ["LlamaForCausalLM"]}, ""),
        ("zero-lora", {"architectures": ["GptOssForCausalLM"]}, "not for GptOssForCausalLM"),
    ],
)
def test_a_feature_says_what_a_model_lacks_for_it(id_: str, config: dict[str, object], why: str) -> None:
    said = FEATURES[id_].unavailable("cuda", 2, config)
    assert said.endswith(why)
    assert bool(said) == bool(why)


@pytest.mark.parametrize(
    ("id_", "flags", "environment", "says"),
    [
        ("page-size", {"--page-size": "16"}, {}, "the base has it too: --page-size=16"),
        ("page-size", {"--page-size": "32"}, {}, "--page-size=32 overrides"),
        ("overlap", {"--disable-overlap-schedule": "true"}, {}, "--disable-overlap-schedule=true overrides"),
        ("cuda-graph-decode", {"--disable-decode-cuda-graph": "true"}, {}, "--disable-decode-cuda-graph=true overrides"),
        ("no-radix-cache", {"--disable-radix-cache": "true"}, {}, "the base has it too: --disable-radix-cache=true"),
        ("retraction", {}, {"SGLANG_TEST_RETRACT": "1"}, "the base has it too: SGLANG_TEST_RETRACT=1"),
        ("attention-backend", {}, {}, "the base has it too: its attention backend is flashinfer"),
        ("attention-backend", {"--attention-backend": "fa3"}, {}, "--attention-backend=fa3 overrides"),
        ("page-size", {"--chunked-prefill-size": "16"}, {"SGLANG_TEST_RETRACT": "1"}, ""),
        ("expert-parallel", {"--tp-size": "2"}, {}, ""),
        ("zero-lora", {"--enable-lora": "true"}, {}, ""),
    ],
)
def test_the_engines_own_flags_decide_what_they_override(
    id_: str, flags: dict[str, str], environment: dict[str, str], says: str
) -> None:
    found = FEATURES[id_].decided(flags, environment, "flashinfer")
    assert found.startswith(says)
    assert bool(found) == bool(says)
