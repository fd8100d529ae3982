"""The built-in set: synthetic questions in MMLU's format that the tiny model can answer.

A question lists a few facts about invented names and asks for one of them, so it can only be answered by attending to the prompt:
nothing can be known beforehand, and a model with wrong attention drops to chance or below. The sets are endless and deterministic:
question ``i`` of seed ``s`` is the same on every machine.

These questions are *synthetic*, and every report states that: they gate an attention backend; they do not grade a model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from assay.evals.questions import GROUPS, LETTERS, Question, choice_question

BUILTIN_SEED = 20261120
"""Seed of the built-in set. Training uses other seeds, and drops any draw with facts from the built-in set."""
BUILTIN_POOL = 4096
"""Questions of the built-in set that a run draws from; more if it may ask more."""
_FEWEST_FACTS, _MOST_FACTS = 4, 8

_ONSETS = "b d f g j k l m n p r s t v w z".split()
_NAME_RHYMES = "al en ir on ul as ek om".split()
_THING_RHYMES = "ax ev ig od um esh irt oln".split()


def _words(rhymes: list[str], count: int, seed: int) -> tuple[str, ...]:
    syllables = [onset + rhyme for onset in _ONSETS for rhyme in rhymes]
    words = [first + second for first in syllables for second in syllables if first != second]
    return tuple(sorted(random.Random(seed).sample(words, count)))


NAMES = tuple(word.capitalize() for word in _words(_NAME_RHYMES, 128, seed=1))
THINGS = _words(_THING_RHYMES, 128, seed=2)


RELATIONS = {
    "stem": ("reacts with", "What does {name} react with?"),
    "humanities": ("writes to", "Whom does {name} write to?"),
    "social_sciences": ("trades with", "Whom does {name} trade with?"),
    "other": ("lives near", "What does {name} live near?"),
}
"""By group: the verb that states a fact, and the question for a name."""


@dataclass(frozen=True)
class Draw:
    """A drawn set of facts, in the relation of a group: ``facts[i]`` is (name, thing)."""

    group: str
    facts: tuple[tuple[str, str], ...]

    @property
    def statement(self) -> str:
        """The facts as text. A word precedes the first name, so that every name is preceded by a space."""
        pairs = " ".join(f"{name} {thing} ." for name, thing in self.facts)
        return f"Facts, {RELATIONS[self.group][0]}: {pairs}"

    def ask(self, rng: random.Random, about: int, with_statement: bool = True) -> tuple[str, tuple[str, ...], str]:
        """Draw the text, options and right letter of a question about fact number ``about``.

        Wrong options come from the other facts first, so that recognising an option is not enough.
        """
        name, thing = self.facts[about]
        others = [other for i, (_, other) in enumerate(self.facts) if i != about]
        rng.shuffle(others)
        wrong = others[:3]
        while len(wrong) < 3:
            stranger = rng.choice(THINGS)
            if stranger != thing and stranger not in wrong:
                wrong.append(stranger)
        options = [thing, *wrong]
        rng.shuffle(options)
        asked = RELATIONS[self.group][1].format(name=name)
        text = f"{self.statement}\n{asked}" if with_statement else asked
        return text, tuple(options), LETTERS[options.index(thing)]


def draw(rng: random.Random, group: str, fewest: int = _FEWEST_FACTS, most: int = _MOST_FACTS) -> Draw:
    """Draw ``fewest`` to ``most`` facts without repeating names or things."""
    count = rng.randint(fewest, most)
    facts = tuple(zip(rng.sample(NAMES, count), rng.sample(THINGS, count), strict=True))
    return Draw(group, facts)


def questions(seed: int = BUILTIN_SEED) -> Iterator[Question]:
    """Yield the endless questions of a seed, alternating between groups."""
    return (question(index, seed) for index in itertools.count())


def question(index: int, seed: int = BUILTIN_SEED) -> Question:
    """Make question `index` of a seed. It has its own random generator, so it does not depend on the other questions."""
    rng = random.Random(f"{seed}/{index}")
    group = GROUPS[index % len(GROUPS)]
    drawn = draw(rng, group)
    text, options, answer = drawn.ask(rng, about=rng.randrange(len(drawn.facts)))
    return choice_question(f"synthetic-{seed}-{index:05d}", f"synthetic_{group}", group, text, options, answer)
