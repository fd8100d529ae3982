"""Layers are known by the path of their modules, and not by their place in the KV pool."""

from __future__ import annotations

from torch import nn

from assay.harness.engines.sglang.kv_pool import layer_number, number_layers


class Attention(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.tp_q_head_num = layer_id, 4


def model(*layers: dict[str, Attention]) -> nn.Module:
    inner = nn.Module()
    inner.layers = nn.ModuleList(nn.ModuleDict(layer) for layer in layers)
    whole = nn.Module()
    whole.model = inner
    return whole


def test_layers_that_read_the_cache_of_another_one_have_numbers_of_their_own() -> None:
    """As in Gemma 3n, whose last layers read K and V of an earlier one."""
    attentions = [Attention(0), Attention(1), Attention(1), Attention(0)]
    number_layers(model(*({"attn": one} for one in attentions)))
    assert [layer_number(one) for one in attentions] == [0, 1, 2, 3]
    assert [one.layer_id for one in attentions] == [0, 1, 1, 0], "their places in the pool stay"


def test_two_attentions_of_a_layer_are_one_layer() -> None:
    """As in DeepSeek-V2."""
    attentions = [{"attn_mqa": Attention(number), "attn_mha": Attention(number)} for number in range(2)]
    number_layers(model(*attentions))
    assert [[layer_number(one) for one in layer.values()] for layer in attentions] == [[0, 0], [1, 1]]


def test_an_attention_without_a_path_of_layers_has_its_own_number() -> None:
    alone = Attention(5)
    number_layers(alone)
    assert layer_number(alone) == 5
