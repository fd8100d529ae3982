"""Which probes an arm changes, and what they alone have in common: lengths, and the borders of pages and chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations

from assay.evals.invariance_load import CHUNK, DEPTH, PAGE
from assay.harness.evidence.invariance import InvarianceManifest, ProbeReply
from assay.harness.judge.probe_scores import MEASURES, Bound, Measure, places

_LONG = 1024
_FEWEST = 2
"""Probes that change, and that do not, from which on what they have in common is no chance."""
_Trait = tuple[str, frozenset[str]]
"""In words, and the probes that have it."""


def changed_probes(base: Sequence[ProbeReply], arm: Sequence[ProbeReply], limits: Mapping[Measure, Bound]) -> list[str]:
    """Return the probes with a position out of bounds, in their order."""
    compared = {measure: places(base, arm, measure) for measure in MEASURES}
    beyond = {place.probe for measure in MEASURES for place in compared[measure] if place.kl > limits[measure].worst}
    return [reply.probe for reply in base if reply.probe in beyond]


def own_alone(base: Sequence[ProbeReply], arm: Sequence[ProbeReply], limits: Mapping[Measure, Bound]) -> list[str]:
    """Return the probes of which nothing differs but the log-probabilities of the prompt's own tokens.

    A server that hands out other requests' log-probabilities shows this: they are cut from one list of a whole batch, the most
    probable tokens are listed by request.
    """
    of_base = {reply.probe: reply.prefill for reply in base}
    restored = [
        reply.model_copy(update={"prefill": reply.prefill.model_copy(update={"own": own.own})})
        for reply in arm
        if (own := of_base.get(reply.probe)) and (own.first, own.end) == (reply.prefill.first, reply.prefill.end)
    ]
    differing = {*changed_probes(base, restored, limits)}
    chosen = {reply.probe for reply in restored} - differing
    return [probe for probe in changed_probes(base, arm, limits) if probe in chosen]


def in_common(changed: Collection[str], manifest: InvarianceManifest) -> str:
    """Say in how many probes an arm differs, and which one simplest property, if any, separates them from all others."""
    lengths = manifest.lengths
    if not changed:
        return ""
    of = f"in {len(changed)} of {len(lengths)} probes"
    if min(len(changed), len(lengths) - len(changed)) < _FEWEST:
        return of
    traits = [trait for trait in _traits(lengths, CHUNK[manifest.spec["device"]]) if 0 < len(trait[1]) < len(lengths)]
    both = [
        (f"{words} and {further}", having & beside) for (words, having), (further, beside) in combinations(traits, 2)
    ]
    for simple in (traits, both):
        if separating := [words for words, having in simple if having == set(changed)]:
            return f"{of}, those {separating[0]}" if len(separating) == 1 else of
    return of


def _traits(lengths: Mapping[str, tuple[int, int, int]], chunk: int) -> Iterator[_Trait]:
    """Yield what probes can have in common, each beside its opposite."""
    having: dict[tuple[str, str], Callable[[int, int, int], bool]] = {
        ("with a shared prefix", "without a shared prefix"): lambda prompt, shared, depth: shared > 0,
        (f"of more than {chunk} tokens", f"of up to {chunk} tokens"): lambda prompt, shared, depth: prompt > chunk,
        (f"of more than {_LONG:,} tokens", f"of up to {_LONG:,} tokens"): lambda prompt, shared, depth: prompt > _LONG,
        (f"with more than {chunk} new tokens", f"with up to {chunk} new tokens"): lambda prompt, shared, depth: (
            prompt - shared > chunk
        ),
        (f"that end inside a page of {PAGE}", f"that fill pages of {PAGE}"): lambda prompt, shared, depth: (
            prompt % PAGE > 0
        ),
        (f"that end inside a chunk of {chunk}", f"that fill chunks of {chunk}"): lambda prompt, shared, depth: (
            prompt % chunk > 0
        ),
        (f"whose shared prefix ends inside a page of {PAGE}", f"whose shared prefix, if any, fills pages of {PAGE}"): (
            lambda prompt, shared, depth: shared % PAGE > 0
        ),
        (f"with {DEPTH} generated tokens", "with few generated tokens"): lambda prompt, shared, depth: depth == DEPTH,
    }
    for (words, opposite), holds in having.items():
        chosen = frozenset(probe for probe, length in lengths.items() if holds(*length))
        yield words, chosen
        yield opposite, frozenset(lengths) - chosen
