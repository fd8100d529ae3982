"""Long-context retrieval, built in: find one fact among hundreds, behind a prefix of 1k to 32k tokens that several questions share.

Bugs of masks and of paging show where the prefix is long and cached: the first question of a haystack computes the prefix, the
next ones find it in the cache, and their answers lie at all depths. A haystack states facts as the synthetic questions do
(`assay.evals.synthetic`), as many as fill its length; names do not repeat, so there is one right answer. All of it follows from a
seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay.evals.mmlu import Drawn
from assay.evals.questions import GROUPS, Question, choice_question
from assay.evals.synthetic import NAMES, THINGS, Draw, syllables
from assay.harness.errors import UsageError

NAME = "retrieval"
# Tokens of a prompt, by default; those that fit into the model.
_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_SEED = 20261121
# Questions about one haystack; their facts lie one in each quarter of it. They count as one unit, so few of them are wanted.
_PER_HAYSTACK = 4
_FEWEST_FACTS = _PER_HAYSTACK
# Tokens by which the prompts of one haystack may differ: in the name that is asked for and the four options.
_OPTIONS_VARY = 16


@dataclass(frozen=True)
class PromptRoom:
    """The limit of a prompt in the context of a model.

    Attributes:
        context: tokens of prompt and answer together.
        answer: tokens kept for the answer and the chat template.
        count: tokens of a text.
    """

    context: int
    answer: int
    count: Callable[[str], int]


def draw_retrieval(lengths: str, most: int, seed: int, fit: PromptRoom) -> Drawn:
    """Draw questions; the lengths take turns, haystack by haystack.

    Args:
        lengths: of the prompts in tokens, separated by commas ("1024,4096", "4k"); empty for those of `_LENGTHS` that fit.
        most: largest number of questions; of whole haystacks, at least one.
        seed: of haystacks, facts and questions.
        fit: the model.

    Returns:
        Questions with four options. Their subject is ``retrieval_<tokens>``; those about one haystack are one unit.

    Raises:
        UsageError: a length is no number, or does not fit into the model.
    """
    chosen = _lengths(lengths, fit)
    haystacks = max(1, most // _PER_HAYSTACK)
    questions = [
        question for place in range(haystacks) for question in _haystack(chosen[place % len(chosen)], place, seed, fit)
    ]
    return Drawn(tuple(questions), len({question.unit for question in questions}))


def _lengths(given: str, fit: PromptRoom) -> tuple[int, ...]:
    most = fit.context - fit.answer
    if not given:
        fitting = tuple(length for length in _LENGTHS if length <= most)
        if not fitting:
            raise UsageError(
                f"The model takes {fit.context} tokens, of which {fit.answer} are for the answer.",
                f"room for a prompt of {_LENGTHS[0]} tokens",
                "use a model with a longer context, a smaller --max-tokens, or retrieval:LENGTHS",
            )
        return fitting
    try:
        chosen = tuple(
            int(float(part[:-1]) * 1024) if part.lower().endswith("k") else int(part) for part in given.split(",")
        )
    except ValueError:
        raise UsageError(
            f"retrieval:{given} is not a list of lengths.", "tokens, as in retrieval:1024,4k", "correct it"
        ) from None
    if wrong := [length for length in chosen if not 0 < length <= most]:
        raise UsageError(
            f"A prompt of {wrong[0]} tokens does not fit: the model takes {fit.context}, of which {fit.answer} are for the answer.",
            f"lengths from 1 to {most}",
            "leave it out, or give a smaller --max-tokens",
        )
    return chosen


def _haystack(length: int, place: int, seed: int, fit: PromptRoom) -> Iterator[Question]:
    """Yield the questions about one haystack. It has its own random generator, so it does not depend on how many are asked."""
    rng = random.Random(f"{_SEED}/{seed}/{length}/{place}")
    group = GROUPS[place % len(GROUPS)]
    names, things = syllables()
    enough = max(_FEWEST_FACTS, length // 3)  # a fact has three tokens at least
    pairs = list(zip(_some(NAMES, names, enough, rng), _some(THINGS, things, enough, rng), strict=False))
    facts = _filling(length, pairs, lambda count: _asked(group, pairs[:count], 0, rng), fit)
    part = facts / _PER_HAYSTACK
    for number in rng.sample(range(_PER_HAYSTACK), _PER_HAYSTACK):
        about = rng.randrange(int(number * part), int((number + 1) * part))
        yield _asked(
            group, pairs[:facts], about, rng, f"retrieval-{length}-{seed}-{place}-{number}", f"retrieval_{length}"
        )


def _some(known: Sequence[str], words: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Draw that many words in a random order, those that the tiny model knows first."""
    drawn = rng.sample(words, min(len(words), count + len(known)))
    return [*rng.sample(known, len(known)), *(word for word in drawn if word not in known)][:count]


def _asked(
    group: str, facts: Sequence[tuple[str, str]], about: int, rng: random.Random, id_: str = "", subject: str = ""
) -> Question:
    drawn = Draw(group, tuple(facts))
    text, options, answer = drawn.ask(random.Random(rng.random()), about)
    return choice_question(id_, subject, group, text, options, answer)


def _filling(
    length: int, facts: Sequence[tuple[str, str]], question: Callable[[int], Question], fit: PromptRoom
) -> int:
    """Return the number of facts that fill a prompt of this length. Raises UsageError if not even `_FEWEST_FACTS` fit."""
    # A fact's tokens are counted alone: tokenizers split at spaces, so they add up, and a long prompt is counted once or twice.
    length -= _OPTIONS_VARY
    count, used = _FEWEST_FACTS, fit.count(question(_FEWEST_FACTS).prompt)
    if used > length:
        raise UsageError(
            f"{count} facts do not fit into {length} tokens: they need {used}.",
            "a longer prompt",
            "give a larger length",
        )
    for name, thing in facts[_FEWEST_FACTS:]:
        used += fit.count(f" {name} {thing} .")
        if used > length:
            break
        count += 1
    while count > _FEWEST_FACTS and fit.count(question(count).prompt) > length:
        count -= 1
    return count
