"""vLLM's calls by phase, on stand-ins for its objects; a real engine is in test_inside.py."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.harness.attention.call import KernelRefused
from assay.harness.engines.vllm.engine_call import ServedPass, VLLMCall, kind_of, layer_number, parts_of, spec_of

PAGE, DIM, HEADS, KV_HEADS = 32, 8, 4, 2
# A prompt, a chunk of a prompt, a decode step, the last token of a prompt, and a preempted request that starts again.
REQUESTS, NEW, PREFIX, PROMPT = "abcde", (51, 12, 1, 1, 9), (0, 92, 68, 40, 0), (60, 104, 68, 41, 5)


def test_a_pass_is_split_into_sequences_in_decode_and_the_others() -> None:
    extend, decode = parts_of(REQUESTS, NEW, PREFIX, PROMPT)
    assert (extend.phase, decode.phase) == ("extend", "decode")
    assert (extend.requests, decode.requests) == (("a", "b", "d", "e"), ("c",))
    assert extend.new == (51, 12, 1, 9)
    assert extend.prefix == (0, 92, 40, 0)
    assert isinstance(extend.rows, torch.Tensor)
    assert isinstance(decode.rows, torch.Tensor)
    assert extend.rows.tolist() == [*range(63), 64, *range(65, 74)]
    assert decode.rows.tolist() == [63]


@pytest.mark.parametrize("wanted", ["extend", "decode"])
def test_a_pass_in_one_phase_is_one_part_without_copies(wanted: str) -> None:
    new, prefix = ((1, 1), (8, 9)) if wanted == "decode" else ((4, 1), (4, 8))
    [part] = parts_of("ab", new, prefix, (8, 9))
    assert part.phase == wanted
    assert part.slots == (0, 1)
    assert part.rows == slice(0, sum(new))


def runner_of(new: tuple[int, ...], prefix: tuple[int, ...], prompt: tuple[int, ...]) -> tuple[Any, Any]:
    """Return stand-ins for a V1 runner and a scheduler's output, whose slots hold more than the pass."""
    ids = [chr(ord("a") + slot) for slot in range(len(new))]
    batch = SimpleNamespace(
        req_ids=ids, num_reqs=len(ids), num_computed_tokens_cpu=torch.tensor([*prefix, 99]).numpy(),
        num_prompt_tokens=torch.tensor([*prompt, 99]).numpy(),
    )  # fmt: skip
    tokens = SimpleNamespace(cpu=torch.arange(100, 100 + sum(new) + 5, dtype=torch.int32))
    requests = {name: SimpleNamespace(num_prompt_tokens=length) for name, length in zip(ids, prompt, strict=True)}
    first = [name for name, computed in zip(ids, prefix, strict=True) if computed == 0]
    running = [name for name in ids if name not in first]
    scheduled = SimpleNamespace(
        num_scheduled_tokens=dict(zip(ids, new, strict=True)),
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=0) for _ in first],
        scheduled_cached_reqs=SimpleNamespace(req_ids=running, num_computed_tokens=[prefix[ids.index(name)] for name in running]),
    )
    return SimpleNamespace(input_batch=batch, input_ids=tokens, requests=requests), scheduled


def test_a_pass_reads_its_slots_and_its_tokens() -> None:
    served = ServedPass(*runner_of(NEW, PREFIX, PROMPT))
    extend, decode = served.parts
    assert served.sequences == 5
    assert served.tokens(decode).tolist() == [163]
    assert served.tokens(extend)[-1] == 173


@pytest.mark.parametrize(
    ("new", "prefix", "prompt", "kind"),
    [
        ((51,), (0,), (51,), ("extend", False)),
        ((51, 1), (0, 9), (51, 9), ("extend", False)),
        ((51, 3), (0, 9), (51, 12), ("extend", True)),
        ((1, 1), (8, 9), (8, 9), ("decode", True)),
        ((1,), (8,), (9,), ("extend", True)),
        ((), (), (), None),
    ],
)
def test_the_kind_of_a_pass_is_known_before_it_runs(new: Any, prefix: Any, prompt: Any, kind: Any) -> None:
    assert kind_of(*runner_of(new, prefix, prompt)) == kind


class AttentionType(str, Enum):  # noqa: UP042 (as vLLM declares it)
    """vLLM's enum."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


def layer_of(**changes: Any) -> Any:
    """Return a stand-in for vLLM's layer."""
    impl = {
        "scale": 0.125,
        "sliding_window": -1,
        "logits_soft_cap": 0,
        "alibi_slopes": None,
        "sinks": None,
        "attn_type": AttentionType.DECODER,
    }
    attention = {"layer_name": "model.layers.3.self_attn.attn", "impl": SimpleNamespace(**impl | changes)}
    return SimpleNamespace(**attention)


def call_of(window: int) -> tuple[VLLMCall, torch.Tensor]:
    """Return the decode part of a mixed call on pages side by side, and K of all its slots."""
    served = ServedPass(*runner_of((3, 1), (0, 40), (3, 40)))
    cache = torch.randn(4, KV_HEADS, PAGE, 2 * DIM)
    metadata = SimpleNamespace(
        seq_lens=torch.tensor([3, 41]), block_table=torch.tensor([[1, 0], [3, 2]], dtype=torch.int32), causal=True
    )
    decode = served.parts[1]
    q = torch.randn(4, HEADS, DIM)
    call = VLLMCall("decode", served, decode, layer_of(sliding_window=window), q, None, None, metadata, cache, q.clone)
    return call, torch.cat([cache[3], cache[2]], dim=1)[:, :, :DIM].transpose(0, 1)


@pytest.mark.parametrize(("window", "first"), [(-1, 0), (16, 25)])
def test_a_part_has_its_rows_its_pages_and_only_keys_that_its_window_sees(
    window: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.harness.engines.vllm.kv_pages import Pages

    monkeypatch.setattr(Pages, "of", classmethod(lambda cls, layer, cache, dtype: cls(cache, None)))
    call, keys = call_of(window)
    packed = call.pack("a test")
    assert torch.equal(packed.q, call.q[3:4])
    assert torch.equal(packed.k, keys[first:41])
    assert (packed.lens_q, packed.lens_k) == ([1], [41 - first])
    assert packed.spec.mask.window == max(0, window)
    assert (packed.layer, packed.phase, packed.scale) == (3, "decode", 0.125)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"alibi_slopes": torch.ones(4)}, "ALiBi"), ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only attention")],
)
def test_what_the_contract_does_not_express_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(KernelRefused, match=f"layer 3 needs {what}.*so mine cannot serve it"):
        spec_of(layer_of(**changes), SimpleNamespace(causal=True), "extend", "mine")


def test_windows_caps_and_sinks_are_read_in_either_form() -> None:
    spec = spec_of(
        layer_of(sliding_window=(63, 0), logits_soft_cap=20.0, sinks=torch.tensor([0.5, -1.0])),
        SimpleNamespace(), "extend", "mine",
    )  # fmt: skip
    assert (spec.mask.window, spec.softcap, spec.sinks) == (64, 20.0, (0.5, -1.0))
    assert spec_of(layer_of(sliding_window=(-1, -1)), SimpleNamespace(), "extend", "mine").mask.window == 0


def test_a_layer_without_a_number_is_refused() -> None:
    with pytest.raises(KernelRefused, match=r"'vision\.attn' is in no numbered layer"):
        layer_number(SimpleNamespace(layer_name="vision.attn"))


def test_a_layer_that_attends_to_parts_of_sequences_is_refused() -> None:
    call, _ = call_of(-1)
    call.metadata.seq_lens = torch.tensor([3, 20, 21])
    with pytest.raises(KernelRefused, match="attends to parts of the sequences"):
        call.pack("mine")
