"""The fingerprint of a process, taken from stand-ins for a ModelRunner: no engine is started."""

from __future__ import annotations

import json
import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:  # which takes seconds to import
    pytest.skip("needs SGLang", allow_module_level=True)

from assay.harness.engines.inside.control import Control, set_control
from assay.harness.engines.sglang.fingerprint import FingerprintWriter, describe
from assay.harness.engines.sglang.launch import STAND_INS
from assay.harness.evidence.fingerprint import OF_PROCESS, RopeTable
from assay.harness.fingerprint.facts import CHANGE_NUMBERS, as_read
from tests.harness.fingerprint.models import write_model

pytestmark = pytest.mark.sglang


def table(theta: float, rows: int = 512, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    frequencies = theta ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies
    return (scale * torch.cat([angles.cos(), angles.sin()], -1)).to(dtype)


class Rotary(torch.nn.Module):
    cos_sin_cache: torch.Tensor

    def __init__(self, made: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", made, persistent=False)


def runner(tmp_path: Path, made: torch.Tensor, **config: Any) -> Any:
    rotary, model = Rotary(made), torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"rotary_emb": rotary}) for _ in range(3))
    model.gate = torch.nn.Linear(4, 4).bfloat16()
    folder = write_model(tmp_path / "model", {"rope_theta": 500000.0, **config})
    return SimpleNamespace(
        model=model,
        device="cpu",
        server_args=SimpleNamespace(model_path=str(folder), dtype="float32", sampling_backend="pytorch"),
        model_config=SimpleNamespace(quantization=None, dtype=torch.float32),
        attn_backend=object(),
    )


def ropes(tmp_path: Path, made: torch.Tensor, **config: Any) -> RopeTable:
    (rope,) = describe(runner(tmp_path, made, **config)).rope or ()
    return rope


def test_a_right_table_is_not_wrong_in_any_dtype(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rope = ropes(tmp_path, table(500000.0, dtype=dtype))
        assert (rope.wrong, rope.layers, rope.rows) == ("", "0-2", 512)
        assert rope.error is not None
        assert rope.error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (table(10000.0), "rope_theta is 10,000; config.json says 500,000"),
        (table(500000.0, scale=1.2), "cos and sin are scaled by 1.2; config.json says 1"),
        (table(500000.0)[:, :16], "RoPE rotates 16 dims per head; config.json says 32"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, made: torch.Tensor, says: str) -> None:
    assert ropes(tmp_path, made).wrong == says


V5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


@pytest.mark.parametrize("config", [{}, V5])
@pytest.mark.parametrize(
    ("override", "made", "says"),
    [
        ({"rope_theta": 50000.0}, table(50000.0), ""),
        (
            {"rope_theta": 50000.0},
            table(500000.0),
            "rope_theta is 500,000; config.json with --json-model-override-args says 50,000",
        ),
        ({"rope_parameters": {"rope_theta": 50000.0}}, table(50000.0), ""),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2}}, table(500000.0), "RoPE is not scaled"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, table(500000.0), ""),
        ({"tie_word_embeddings": True}, table(500000.0), ""),
    ],
)
def test_an_override_of_the_configuration_is_what_is_asked(
    tmp_path: Path, override: dict[str, Any], config: dict[str, Any], made: torch.Tensor, says: str
) -> None:
    loaded = runner(tmp_path, made, **config)
    loaded.server_args.json_model_override_args = json.dumps(override)
    (rope,) = describe(loaded).rope or ()
    assert rope.wrong.startswith(says)
    assert bool(rope.wrong) == bool(says)


def test_the_bias_that_corrects_scores_is_kept_and_no_other_of_a_router(tmp_path: Path) -> None:
    loaded = runner(tmp_path, table(500000.0))  # its gate has a bias in bfloat16, as that of gpt-oss
    loaded.model.gate.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4).bfloat16())
    kept = {weight.name: weight.kept for weight in describe(loaded).weights or ()}
    assert kept == {"gate.weight": "", "gate.bias": "", "gate.e_score_correction_bias": "router bias"}


def test_rows_of_positions_in_bfloat16_are_wrong_though_the_frequencies_are_right(tmp_path: Path) -> None:
    """bfloat16 holds no odd position above 256, so the rows of two positions are the same."""
    frequencies = 500000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angles = torch.arange(512).bfloat16().double()[:, None] * frequencies
    rope = ropes(tmp_path, torch.cat([angles.cos(), angles.sin()], -1).float())
    assert rope.wrong.startswith(
        "cos and sin are off by 0.86 at position 257, the first that is wrong, and by up to 0.96 within 512"
    )
    assert rope.error == pytest.approx(2 * math.sin(0.5), abs=0.05)


def test_rows_that_were_added_later_are_wrong_from_their_first_on(tmp_path: Path) -> None:
    """SGLang 0.5.17 lengthens YaRN's table with rows of another base."""
    later, number = table(500000.0, 768), table(500000.0, 768)
    later[512:] = table(10000.0, 768)[512:]
    number[600, 3] = float("nan")
    for made, at, error in ((later, "512", "2"), (number, "600", "4")):
        wrong = ropes(tmp_path, made).wrong
        assert f"at position {at}, the first that is wrong, and by up to {error} within 768 positions" in wrong


def test_parts_that_cannot_be_read_are_not_observed(tmp_path: Path) -> None:
    broken = runner(tmp_path, table(500000.0))
    (tmp_path / "model" / "config.json").write_text("[")
    made = describe(broken)
    assert "JSONDecodeError" in made.not_observed["rope"]
    assert made.weights is not None
    assert made.seconds["weights"] >= 0


def test_a_process_tells_the_class_and_the_end_tokens_of_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS)  # as servers on a CPU have them
    made = describe(runner(tmp_path, table(500000.0)))
    assert made.tokens is not None, made.not_observed
    assert (made.tokens.bos, made.tokens.eos) == (0, (1,))
    assert made.tokens.tokenizer
    assert made.tokens.retold["user"][0] == 0, "the template begins with a BOS"
    assert made.generation is not None
    assert made.packages is not None


def test_chats_are_those_of_the_template_that_a_server_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    loaded = runner(tmp_path, table(500000.0))
    own = describe(loaded).tokens
    given = tmp_path / "given.jinja"
    given.write_text("{{ raise_exception('no tools') if tools else messages[0]['content'] }}\n")
    loaded.server_args.chat_template = str(given)
    other = describe(loaded).tokens
    loaded.server_args.chat_template = "chatml"
    unknown = describe(loaded).tokens
    assert own
    assert other
    assert unknown
    assert own.chats.keys() == own.retold.keys() == {*other.chats, *other.refused}
    assert other.refused.keys() == {"tools", "tool answer"}
    assert other.chats["user"] != own.chats["user"]
    assert unknown.chats == unknown.refused == {}
    assert own.retold == other.retold == unknown.retold, "a client renders with the template of the model"


def batch(*rids: str, idle: bool = False) -> Any:
    positions = torch.arange(0 if idle else 5)
    return SimpleNamespace(rids=list(rids), positions=positions, forward_mode=SimpleNamespace(is_idle=lambda: idle))


def test_a_process_writes_once_for_each_label(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    writer = FingerprintWriter(runner(tmp_path, table(500000.0)), folder)
    writer.after(batch("a"))
    assert OF_PROCESS.read_each(folder) == {}
    set_control(folder, Control(fingerprint="first"))
    writer.after(batch())  # the engine's own warm-up
    assert OF_PROCESS.read_each(folder) == {}
    writer.after(batch("b"))
    ((name, made),) = OF_PROCESS.read_each(folder).items()
    assert (name, made.positions) == ("first-0000", (0, 1, 2, 3, 4))
    (folder / "fingerprint" / "first-0000.json").unlink()
    writer.after(batch("c"))
    assert OF_PROCESS.read_each(folder) == {}
    set_control(folder, Control(fingerprint="second"))
    writer.after(batch(idle=True))  # of a rank without a request
    assert list(OF_PROCESS.read_each(folder)) == ["second-0000"]
    assert json.loads((folder / "fingerprint" / "second-0000.json").read_text())["packages"]["torch"] == torch.__version__


def test_loaded_adapters_are_named_and_told_apart(tmp_path: Path) -> None:
    def adapter(value: float) -> Any:
        weights = {"o_proj.lora_A.weight": torch.ones(2, 4), "o_proj.lora_B.weight": torch.full((4, 2), value)}
        return SimpleNamespace(layers=[SimpleNamespace(weights=weights)], scaling=2.0)

    made = runner(tmp_path, table(500000.0))
    assert describe(made).adapters == {}
    manager = SimpleNamespace(loras={"1": adapter(0.5), "2": adapter(0.0)}, lora_refs={"1": SimpleNamespace(lora_name="mine")})
    made.lora_manager = manager
    adapters = describe(made).adapters or {}
    assert set(adapters) == {"mine", "2"}
    assert adapters["mine"].endswith("scaling 2, norm of B 1.414")
    assert adapters["2"].endswith("norm of B 0")
    assert adapters["mine"].partition(",")[0] != adapters["2"].partition(",")[0]


def test_what_auto_was_resolved_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    def triton_linear() -> None: ...

    def forward_cpu() -> None: ...

    runner_of = SimpleNamespace(runner_backend=MoeRunnerBackend.DEEP_GEMM)
    on_cpu = {"_forward_method": None, "_resolve_forward_method": lambda: forward_cpu}
    loaded = runner(tmp_path, table(500000.0))
    for name, method, fields in (
        ("FusedMoE", "Fp8MoEMethod", {"runner": runner_of}),
        ("CpuMoE", "UnquantizedFusedMoEMethod", {"runner": runner_of, **on_cpu}),
        ("QKVParallelLinear", "Fp8LinearMethod", {"w8a8_block_fp8_linear": partial(triton_linear), "w8a8_mxfp8_linear": None}),
        ("RowParallelLinear", "AWQLinearMethod", {}),
        ("RadixAttention", "Fp8KVCacheMethod", {}),
    ):
        made = type(method, (torch.nn.Module,), {})()
        made.__dict__.update(fields)
        layer = type(name, (torch.nn.Module,), {})()
        layer.quant_method = made
        loaded.model.add_module(name, layer)
    monkeypatch.setattr("sglang.srt.distributed.parallel_state.get_tp_group", lambda: SimpleNamespace(world_size=1))
    runs = {row.runs: row.operation for row in describe(loaded).backends or ()}
    assert runs["Fp8MoEMethod (deep_gemm)"] == runs["UnquantizedFusedMoEMethod (forward_cpu)"] == "moe"
    assert "forward_cpu" not in runs, "is named once"
    assert runs["Fp8LinearMethod (triton_linear)"] == runs["AWQLinearMethod"] == "gemm"
    assert runs["Fp8KVCacheMethod"] == "kv cache", "it scales K and V"


def test_variables_that_count_are_sglangs_own_and_mean_unset_what_it_takes_them_for() -> None:
    from sglang.srt.environ import envs

    own = {name: unset for name, (unset, _) in CHANGE_NUMBERS.items() if "SGLANG" in name or name.startswith("USE_")}
    assert len(own) > 20
    for name, unset in own.items():
        default = getattr(envs, name).default
        assert as_read(name, "" if default is None else str(default).removesuffix(".0")) == unset


class Norm(torch.nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.variance_epsilon = eps


def test_settings_are_those_of_the_resolved_configuration_and_of_the_layers(tmp_path: Path) -> None:
    """Every layer's norm is ruined by an epsilon of .5, whether the configuration says so or only one layer has it."""

    def settings(asked: float, *held: float) -> dict[str, str]:
        loaded = runner(tmp_path, table(500000.0))
        told = {
            "rms_norm_eps": asked,
            "hidden_act": "silu",
            "_name_or_path": "here",
            "rope_theta": 1.0,
            "sliding_window": None,
            "id2label": {0: "a"},
        }
        loaded.model_config.hf_config = SimpleNamespace(to_dict=lambda: told | {"text_config": {"num_key_value_heads": 8}})
        for layer, eps in zip(loaded.model.layers, held, strict=True):
            layer.norm = Norm(eps)
        made = describe(loaded)
        assert made.config is not None, made.not_observed
        return made.config

    same = settings(1e-5, 1e-5, 1e-5, 1e-5)
    assert same == {
        "rms_norm_eps": "1e-05", "hidden_act": "silu", "rope_theta": "1.0", "text_config.num_key_value_heads": "8",
        "layers.Norm.variance_epsilon": "1e-05",
    }  # fmt: skip
    assert settings(0.5, 0.5, 0.5, 0.5)["rms_norm_eps"] == "0.5"
    one = settings(1e-5, 1e-5, 0.5, 1e-5)["layers.Norm.variance_epsilon"]
    assert one == "1e-05 (layers 0, 2), 0.5 (layers 1)"
