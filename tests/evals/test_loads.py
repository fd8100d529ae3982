from __future__ import annotations

import pytest

from assay.evals.loads import DEFAULT, SHAPES, Shape, check_fit, prefix, prompts, shapes_of
from assay.harness.errors import UsageError

VOCABULARY = 1031


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prompts_have_the_lengths_and_the_shared_prefix_of_their_shape(device: str) -> None:
    for shape in SHAPES[device]:
        made = prompts(shape, 3, VOCABULARY, "seed")
        lengths = {len(tokens) for tokens in made}
        if shape.shortest:
            assert len(lengths) == 3
            assert shape.shortest <= min(lengths) <= max(lengths) <= shape.prompt
        else:
            assert lengths == {shape.prompt}
        assert {tokens[: shape.shared] for tokens in made} == {prefix(shape, VOCABULARY, "seed")}
        assert len({tokens[shape.shared :] for tokens in made}) == 3, "nothing else is shared"


def test_a_load_of_the_default_has_prompts_of_mixed_lengths() -> None:
    assert any(shape.shortest for device in SHAPES for shape in shapes_of(DEFAULT, device))


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    shape = Shape("x", 40, 8, shared=10)
    assert prompts(shape, 2, VOCABULARY, "a") == prompts(shape, 2, VOCABULARY, "a")
    other = prompts(shape, 2, VOCABULARY, "b")
    assert all(one[:10] != two[:10] for one in prompts(shape, 2, VOCABULARY, "a") for two in other)


def test_shapes_are_named_or_given_as_lengths() -> None:
    assert [shape.name for shape in shapes_of(DEFAULT, "cpu")] == list(DEFAULT)
    assert shapes_of(["256:256", "100:20:64"], "cuda") == (Shape("256:256", 256, 256), Shape("100:20:64", 100, 20, 64))


@pytest.mark.parametrize("names", [[], ["short", "short"], ["shot"], ["10"], ["10:1"], ["10:8:10"], ["10:8:-1"], ["1:2:3:4"]])
def test_an_invalid_shape_is_wrong_use(names: list[str]) -> None:
    with pytest.raises(UsageError):
        shapes_of(names, "cpu")


def test_a_shape_longer_than_the_context_is_wrong_use() -> None:
    check_fit([Shape("x", 90, 10)], 100)
    with pytest.raises(UsageError, match=r"91 \+ 10 tokens, but the model takes 100"):
        check_fit([Shape("x", 91, 10)], 100)


def test_special_tokens_at_the_ends_of_the_vocabulary_are_not_drawn() -> None:
    drawn = {token for tokens in prompts(Shape("x", 5000, 2), 2, VOCABULARY, "s") for token in tokens}
    assert 103 <= min(drawn) <= max(drawn) < VOCABULARY - 103
