"""What SGLang's layers ask for, and its KV pools as packed calls, on SGLang's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, Mask
from assay.harness.attention.oracle import oracle
from assay.harness.engines.inside.truth_sums import check_stored
from assay.harness.engines.sglang import native_kernel
from assay.harness.engines.sglang.kv_pool import Pages, joined_rope, layer_number, number_layers, spec_of

pytestmark = pytest.mark.sglang
HEADS, KV_HEADS, DIM, SLOTS, LATENT, ROPE = 4, 2, 8, 64, 16, 4


@pytest.fixture(autouse=True)
def _imported() -> None:
    native_kernel._sglang()


def layer_of(number: int = 0, **asked: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    temperature = asked.pop("temperature", -1)
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, layer_id=number, **asked)
    layer.xai_temperature_len = temperature
    return layer


def window_of(architecture: str, window: int) -> int:
    """Return what SGLang's models of an architecture give to a layer for a window of the configuration."""
    import importlib

    module = importlib.import_module(f"sglang.srt.models.{architecture}")
    return int(module.get_attention_sliding_window_size(SimpleNamespace(sliding_window=window)))


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_causal", "gpt_oss"])
def test_a_window_is_that_of_the_models_configuration(architecture: str) -> None:
    layer = layer_of(sliding_window_size=window_of(architecture, 64))
    assert layer.sliding_window_size == 63
    assert spec_of(layer, {}, "decode", "mine").mask == Mask(window=64)


def test_what_a_layer_asks_for_is_read() -> None:
    for none in (None, -1, 0):
        plain = spec_of(layer_of(3, sliding_window_size=none), {"sinks": None}, "decode", "mine")
        assert plain == CallSpec(DIM**-0.5, layer=3, phase="decode")
    sinks = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.bfloat16)
    spec = spec_of(layer_of(logit_cap=30.0, temperature=1024), {"sinks": sinks}, "extend", "mine")
    assert (spec.softcap, spec.temperature, spec.sinks) == (30.0, 1024, (1.0, -2.0, 0.5, 3.0))
    assert spec.features == ("softcap", "temperature", "sinks")


def test_layers_are_known_by_the_path_of_their_modules_and_not_by_their_place_in_the_pool() -> None:
    """Layers of Gemma 3n read the cache of an earlier one; DeepSeek's have two attentions."""
    model, layers = torch.nn.Module(), [{"mqa": layer_of(0), "mha": layer_of(0)}, {"mqa": layer_of(1)}, {"mqa": layer_of(0)}]
    model.layers = torch.nn.ModuleList(torch.nn.ModuleDict(layer) for layer in layers)
    number_layers(model)
    assert [[layer_number(one) for one in layer.values()] for layer in layers] == [[0, 0], [1], [2]]
    assert layers[2]["mqa"].layer_id == 0
    assert layer_number(layer_of(5)) == 5


class Window:
    """A server with a pool for layers with a window (layer 0) and one for the others (layer 1), of SGLang's own classes."""

    def __init__(self, page: int = 1, dtype: torch.dtype = torch.float32) -> None:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        pool = SWAKVPool(
            size=SLOTS, size_swa=SLOTS // 2, page_size=page, dtype=dtype, head_num=KV_HEADS, head_dim=DIM,
            swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu", enable_alt_stream=False,
        )  # fmt: skip
        self.allocator = SWATokenToKVPoolAllocator(SLOTS, SLOTS // 2, page, dtype, "cpu", pool, need_sort=False)
        table = ReqToTokenPool(size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False)
        self.runner = SimpleNamespace(req_to_token_pool=table, token_to_kv_pool=pool)
        self.pages = Pages(self.runner)
        self.allocator.full_attn_allocator.alloc(3)  # so that the slots of both pools differ
        self.layers = [layer_of(0, sliding_window_size=3), layer_of(1)]

    def prefilled(self, length: int) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Write K and V of a request in all layers; return the batch, and what was written."""
        slots = self.allocator.alloc(length)
        self.runner.req_to_token_pool.req_to_token[0, :length] = slots.int()
        batch = SimpleNamespace(out_cache_loc=slots, req_pool_indices=torch.tensor([0]))
        keys, values = (
            [torch.randn(length, KV_HEADS, DIM, generator=torch.Generator().manual_seed(seed + n)) for n in range(2)]
            for seed in (0, 10)
        )
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            self.pages.write(layer, batch, k, v)
        return batch, keys, values

    def call(self, number: int, batch: Any, length: int) -> Any:
        layer, q = self.layers[number], torch.randn(1, HEADS * DIM, generator=torch.Generator().manual_seed(7))
        return self.pages.packed_call(spec_of(layer, {}, "decode", "mine"), q, layer, batch, [1], [length - 1])


def test_each_pool_is_read_by_its_own_slots_unless_they_are_virtual() -> None:
    server = Window()
    batch, keys, values = server.prefilled(12)
    other = server.runner.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
    assert not torch.equal(other, batch.out_cache_loc)
    for number in (0, 1):
        call = server.call(number, batch, 12)
        assert torch.equal(call.k, keys[number])
        assert torch.equal(call.v, values[number])
    assert server.call(0, batch, 12).spec.mask.window == 4
    server.runner.kv_index_translator = SimpleNamespace(is_translating=True)
    server.pages = Pages(server.runner)
    with pytest.raises(KernelRefused, match="the slots of the KV pool are virtual or a ring"):
        server.call(1, batch, 12)


def test_keys_that_were_dropped_are_left_out_of_the_call() -> None:
    server = Window()
    first, keys, values = server.prefilled(12)
    whole, server.pages = server.call(0, first, 12), Pages(server.runner)
    server.allocator.free_swa(first.out_cache_loc[:8])
    call = server.call(0, first, 12)
    assert torch.allclose(oracle(call), oracle(whole)), "the same attention"
    assert (call.lens_k, call.spec.mask.window) == ([4], 4)
    assert torch.equal(call.k, keys[0][8:])
    assert torch.equal(call.v, values[0][8:])
    assert torch.equal(server.call(1, first, 12).k, keys[1]), "the other layers have all keys"


@pytest.mark.parametrize("dropped", [slice(9), slice(10, 11)])
def test_a_key_that_a_query_sees_and_the_pool_no_longer_has_is_refused_by_name(dropped: slice) -> None:
    server = Window()
    batch, _, _ = server.prefilled(12)
    server.allocator.free_swa(batch.out_cache_loc[dropped])
    with pytest.raises(KernelRefused, match=f"layer 0 needs keys .*no longer has: of each sequence, the first {dropped.stop}$"):
        server.call(0, batch, 12)


def test_a_temperature_of_a_call_that_has_lost_keys_is_refused_by_name() -> None:
    server = Window()
    server.layers[0].xai_temperature_len = 8
    batch, _, _ = server.prefilled(12)
    assert server.call(0, batch, 12).spec.temperature == 8
    server.pages = Pages(server.runner)
    server.allocator.free_swa(batch.out_cache_loc[:5])
    with pytest.raises(KernelRefused, match="layer 0 has a temperature, and the KV pool no longer has the first keys"):
        server.call(0, batch, 12)


class Latent:
    """A server with a pool of latents, and the two attentions of a layer of DeepSeek's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.runtime_context import get_parallel

        pool = MLATokenToKVPool(
            size=SLOTS, page_size=1, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=1, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        table = ReqToTokenPool(size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False)
        table.req_to_token[:2] = (
            torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0)).view(2, -1).int().repeat(1, 2) + 1
        )
        self.pages = Pages(SimpleNamespace(req_to_token_pool=table, token_to_kv_pool=pool))
        self.table = table.req_to_token
        self.absorbed = RadixAttention(HEADS, LATENT + ROPE, 0.1, num_kv_heads=1, layer_id=0, v_head_dim=LATENT)
        self.whole = RadixAttention(HEADS, 24, 0.1, num_kv_heads=HEADS, layer_id=0, v_head_dim=DIM)
        self.k = torch.randn(7, 1, LATENT + ROPE, generator=torch.Generator().manual_seed(1))
        self.batch = SimpleNamespace(
            out_cache_loc=torch.cat([self.table[0, :4], self.table[1, :3]]).long(), req_pool_indices=torch.tensor([0, 1])
        )
        with get_parallel().override(**native_kernel._ONE_RANK):
            self.pages.write(self.absorbed, self.batch, self.k, self.k[..., :LATENT])

    def call(self, arguments: dict[str, Tensor], q: Tensor) -> AttentionCall:
        q, _ = joined_rope(q, None, self.absorbed, arguments)
        spec = spec_of(self.absorbed, arguments, "extend", "mine")
        return self.pages.packed_call(spec, q, self.absorbed, self.batch, [2, 1], [2, 2])


def test_latents_are_read_as_k_whose_first_dims_are_v() -> None:
    server = Latent()
    q = torch.randn(3, HEADS, LATENT + ROPE)
    call = server.call({}, q.flatten(1))
    assert torch.equal(call.k, server.k)
    assert torch.equal(call.v, server.k[..., :LATENT])
    assert (call.spec.layout, call.features) == ("v in k", ("mla",))
    assert torch.equal(call.q, q)


def test_rope_dims_that_are_arguments_of_their_own_are_the_last_of_q() -> None:
    server = Latent()
    q = torch.randn(3, HEADS, LATENT + ROPE)
    call = server.call({"q_rope": q[..., LATENT:]}, q[..., :LATENT])
    assert torch.equal(call.q, q)
    _, k = joined_rope(
        q[..., :LATENT], server.k[:3, :, :LATENT], server.absorbed, {"q_rope": q[..., LATENT:], "k_rope": server.k[:3, :, LATENT:]}
    )
    assert k is not None
    assert torch.equal(k, server.k[:3])


def test_latents_in_fp8_are_stored_k_and_their_first_dims_stored_v() -> None:
    server = Latent(torch.float8_e4m3fn)
    call = server.call({}, torch.randn(3, HEADS * (LATENT + ROPE)))
    assert call.features == ("mla", "stored_kv")
    assert call.stored is not None
    assert torch.equal(call.stored.k.float(), server.k.to(torch.float8_e4m3fn).float())
    assert torch.equal(call.v, call.k[..., :LATENT])
    assert torch.equal(call.stored.v.float(), call.stored.k.float()[..., :LATENT])


@pytest.mark.parametrize("argument", ["topk_indices", "cos_sin_cache", "attn_sink"])
def test_what_sparse_and_fused_latent_attention_is_given_is_refused_by_name(argument: str) -> None:
    with pytest.raises(KernelRefused, match=f"layer 0 needs the argument '{argument}'"):
        spec_of(Latent().absorbed, {argument: torch.zeros(1)}, "decode", "mine")


def test_a_layer_that_makes_k_and_v_of_latents_is_a_call_of_all_of_these() -> None:
    server = Latent()
    q, k, v = (torch.randn(7, HEADS, dim) for dim in (24, 24, DIM))
    spec = spec_of(server.whole, {}, "extend", "mine")
    call = server.pages.packed_call(spec, q.flatten(1), server.whole, server.batch, [4, 3], [0, 0], (k, v))
    assert call.features == ()
    assert torch.equal(call.k, k)
    assert torch.equal(call.v, v)
    assert call.lens_k == [4, 3]
    with pytest.raises(KernelRefused, match="layer 0 attends to 3 of 7 keys in one of several parts"):
        server.pages.packed_call(spec, q[:3].flatten(1), server.whole, server.batch, [2, 1], [2, 2], (k[:3], v[:3]))


def test_a_cache_of_another_dtype_is_refused_by_name() -> None:
    server = Window()
    batch, _, _ = server.prefilled(12)
    pool = server.runner.token_to_kv_pool.full_kv_pool
    pool.k_buffer = [one.to(torch.int8) for one in pool.k_buffer]
    with pytest.raises(KernelRefused, match=r"the KV cache is torch.int8 and q is torch.float32"):
        server.call(1, batch, 12)


def test_a_cache_in_fp8_has_what_was_written_divided_by_the_scales_of_the_layer() -> None:
    server = Window(dtype=torch.float8_e4m3fn)
    for layer in server.layers:
        layer.k_scale, layer.k_scale_float, layer.v_scale, layer.v_scale_float = (torch.tensor(0.5), 0.5, torch.tensor(0.03), 0.03)
    batch, keys, values = server.prefilled(12)
    for number in (0, 1):
        call = server.call(number, batch, 12)
        assert call.stored is not None
        for written, stored, scale, read in (
            (keys[number], call.stored.k, 0.5, call.k), (values[number], call.stored.v, 0.03, call.v),
        ):  # fmt: skip
            assert torch.equal(stored.float(), (written / scale).to(torch.float8_e4m3fn).float())
            assert torch.equal(read, stored.float() * scale)
        assert call.features[-1] == "stored_kv"
        check_stored(call, keys[number][-1:], values[number][-1:])
