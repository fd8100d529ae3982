from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from assay.evals.question_sets import draw
from assay.evals.questions import Question
from assay.evals.retrieval import _OPTIONS_VARY, _PER_HAYSTACK, PromptRoom, draw_retrieval
from assay.harness.engines.model import TINY_MODEL, fit_of
from assay.harness.errors import UsageError

WORDS = PromptRoom(context=40_000, answer=100, count=lambda text: len(text.split()))


def of(lengths: str, most: int = 32, seed: int = 0, fit: PromptRoom = WORDS) -> tuple[Question, ...]:
    return draw_retrieval(lengths, most, seed, fit).questions


def parts(question: Question) -> tuple[str, list[str]]:
    """The text of a question, and its options."""
    text, _, options = question.own.rpartition("\n\n")
    return text, [option[3:] for option in options.split("\n")]


def facts(question: Question) -> dict[str, str]:
    listed = parts(question)[0].split(": ", 1)[1].rpartition("\n")[0]
    pairs = [fact.split() for fact in listed.split(" .") if fact.strip()]
    return dict(pairs)


def test_every_question_has_its_answer_in_its_haystack_once() -> None:
    for question in of("1024,4096"):
        stated = facts(question)
        text, options = parts(question)
        name = next(word for word in text.rpartition("\n")[2].split() if word in stated)
        assert options["ABCD".index(question.answer)] == stated[name]
        assert text.count(f" {name} ") == 2  # the fact and the question
        assert len(set(options)) == 4


def test_prompts_fill_their_length_by_the_models_own_tokens() -> None:
    tiny = fit_of(TINY_MODEL, 32)
    for question in of("1024,3k", fit=tiny):
        length = int(question.subject.removeprefix("retrieval_"))
        assert length - 2 * _OPTIONS_VARY - 8 <= tiny.count(question.prompt) <= length
    assert {question.subject for question in of("32k", most=4, fit=replace(tiny, context=40_000))} == {"retrieval_32768"}


def test_questions_about_one_haystack_share_it_and_are_one_unit() -> None:
    questions = of("512", most=16)
    by_unit = Counter(one.unit for one in questions)
    assert list(by_unit.values()) == [_PER_HAYSTACK] * 4
    first = questions[:_PER_HAYSTACK]
    assert len({parts(one)[0].rpartition("\n")[0] for one in first}) == 1
    assert len({parts(one)[0].rpartition("\n")[2] for one in first}) == _PER_HAYSTACK
    assert draw_retrieval("512", 16, 0, WORDS).units == 4


def test_the_facts_that_are_asked_for_lie_at_all_depths() -> None:
    for start in range(0, 16, _PER_HAYSTACK):
        asked = of("2048", most=16)[start : start + _PER_HAYSTACK]
        names = list(facts(asked[0]))
        depths = sorted(next(names.index(w) for w in parts(one)[0].rpartition("\n")[2].split() if w in names) for one in asked)
        assert [int(depth * _PER_HAYSTACK / len(names)) for depth in depths] == list(range(_PER_HAYSTACK))


def test_the_set_follows_from_its_seed_and_the_lengths_take_turns() -> None:
    assert of("512,1024") == of("512,1024")
    assert of("512,1024") != of("512,1024", seed=1)
    assert of("512,1024", most=8) == of("512,1024", most=32)[:8]
    assert [one.subject for one in of("512,1024", most=12)[::4]] == ["retrieval_512", "retrieval_1024", "retrieval_512"]


def test_by_default_the_lengths_are_those_that_fit() -> None:
    subjects = {one.subject for one in of("", most=64, fit=replace(WORDS, context=5000))}
    assert subjects == {"retrieval_1024", "retrieval_2048", "retrieval_4096"}
    assert {one.subject for one in draw("retrieval", 8, 0, lambda: replace(WORDS, context=1200)).questions} == {"retrieval_1024"}


@pytest.mark.parametrize(
    ("lengths", "context", "found"),
    [
        ("", 1000, "The model takes 1000 tokens"),
        ("8k", 4096, "A prompt of 8192 tokens does not fit"),
        ("one", 4096, "not a list of lengths"),
        ("20", 4096, "do not fit into"),
        ("0", 4096, "A prompt of 0 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(lengths: str, context: int, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        of(lengths, fit=replace(WORDS, context=context))


def test_no_prompt_of_a_haystack_is_longer_than_its_length() -> None:
    fit = replace(WORDS, count=lambda text: len(text) // 4)  # names and options have other numbers of tokens
    lengths = [fit.count(one.prompt) for seed in range(8) for one in of("600", most=16, seed=seed, fit=fit)]
    assert 600 - 2 * _OPTIONS_VARY <= min(lengths) <= max(lengths) <= 600
