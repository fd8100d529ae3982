"""What a pass covers: the counted conditions of the compared calls, against the policy's envelope."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from assay.harness.conditions import BORDER_TOKENS, ENVELOPE, ENVELOPE_OF, PHASES
from assay.harness.config import RunSpec
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts, Missing
from assay.harness.schema import Part
from assay.harness.verdict import Check

CHECK = "envelope-covered"
_TITLE = "the envelope of the policy was covered"
_MOST_WORDS = 4
_BEYOND_ALL = (
    "attention that this model's calls lack: sliding windows, logit caps, attention sinks, cross attention, latent KV caches",
    "speculative decoding",
)


class EnvelopeRow(Part):
    """A condition, and the calls under it that were compared."""

    phase: str
    condition: str = Field(description='id of the condition, such as "new-tokens"')
    title: str
    label: str = Field(description='bucket or kind, such as "129-512"')
    calls: int = Field(description="compared calls, of the layer that has the fewest")
    wanted: bool = Field(description="whether the policy's envelope wants such a call")


class EnvelopeResult(Part):
    """What a verdict covers: the conditions of the calls that were compared in every layer, as counted."""

    policy: str = Field(description='the line of policy, such as "envelope_tokens = 512 (default)"')
    sentence: str = Field(description="how far it reaches, in words")
    reached: dict[str, dict[str, int]] = Field(
        description="phase -> condition -> the largest value that every layer met"
    )
    rows: tuple[EnvelopeRow, ...]
    not_covered: tuple[str, ...] = Field(description="what lies outside")


def envelope_result(spec: RunSpec, counts: EnvelopeCounts | None, claimed: Sequence[str]) -> EnvelopeResult | None:
    """What a verdict covers; None where no call was compared.

    Args:
        spec: the run's.
        counts: what the shadow counted.
        claimed: phases that the candidate claims.
    """
    if counts is None or counts.limits is None or not counts.calls:
        return None
    kinds = Envelope.of(spec).kinds(counts.limits)
    phases = [phase for phase in PHASES if phase in claimed]
    rows = [
        EnvelopeRow(
            phase=phase,
            condition=quantity,
            title=ENVELOPE[quantity].title,
            label=label,
            calls=counts.count(phase, quantity, label),
            wanted=label in kinds[phase].get(quantity, ()),
        )
        for phase in phases
        for quantity in ENVELOPE_OF[phase]
        for label in ENVELOPE[quantity].labels
    ]
    reached = {
        phase: {quantity: counts.reached(phase, quantity) for quantity in Envelope.of(spec).goals(counts.limits)[phase]}
        for phase in phases
    }
    return EnvelopeResult(
        policy=spec.policy_line("envelope_tokens"),
        sentence=_sentence(reached, phases),
        reached=reached,
        rows=tuple(row for row in rows if row.calls or row.wanted),
        not_covered=tuple(_outside(counts, counts.limits, reached, phases)),
    )


def _sentence(reached: dict[str, dict[str, int]], phases: Sequence[str]) -> str:
    parts = []
    if "extend" in phases:
        at = reached["extend"]
        parts.append(
            f"prefill to {at['new-tokens']:,} new tokens, {at['prefix-tokens']:,} cached and {at['total-tokens']:,} in all, "
            f"in batches of up to {at['batch']:,}"
        )
    if "decode" in phases:
        at = reached["decode"]
        parts.append(
            f"decode to {at['total-tokens']:,} tokens and a depth of {at['depth']:,}, in batches of up to {at['batch']:,}"
        )
    else:
        parts.append("decode is the reference's")
    return "; ".join(parts)


def _outside(
    counts: EnvelopeCounts, limits: EngineLimits, reached: dict[str, dict[str, int]], phases: Sequence[str]
) -> list[str]:
    """What lies outside of the counted conditions, in words."""
    found = []
    for phase, values in reached.items():
        more = {
            "new-tokens": "more than {} new tokens at once",
            "prefix-tokens": "a cached prefix of more than {} tokens",
            "total-tokens": "sequences of more than {} tokens",
            "batch": "batches of more than {}",
            "depth": "answers of more than {} tokens",
        }
        found += [f"{phase}: {more[quantity].format(f'{value:,}')}" for quantity, value in values.items()]
    if "decode" not in phases:
        found.append("decode by the candidate: it claims none")
    if "extend" in phases and not counts.count("extend", "chunk", "later chunk"):
        at_once = (
            f", which starts beyond {limits.chunk_tokens:,} tokens" if limits.chunk_tokens else ": it is switched off"
        )
        found.append(f"extend: chunked prefill{at_once}")
    if "extend" in phases and not counts.count("extend", "mix", "extend and decode"):
        why = "no such call was made" if limits.mixed else "the servers ran without --enable-mixed-chunk"
        found.append(f"extend and decode in one call: {why}")
    found.append(f"page sizes other than {limits.page_tokens}")
    return [*found, *_BEYOND_ALL]


def check_envelope(spec: RunSpec, counts: EnvelopeCounts | None, claimed: Sequence[str]) -> Check:
    """Whether calls were compared in every layer under every condition of the policy's envelope, in each phase that is claimed.

    Args:
        spec: the run's.
        counts: what the shadow counted; None if it counted nothing.
        claimed: phases that the candidate claims.
    """
    line = spec.policy_line("envelope_tokens")
    if "layers" not in spec.suites:
        found = f"the suite layers was not requested; {line}"
        return Check(id=CHECK, title=_TITLE, status="not checked", found=found, settles="add layers to --suites")
    if counts is None or not claimed:
        found = f"no compared call was counted; {line}"
        settles = "let assay start the servers, without a URL"
        return Check(id=CHECK, title=_TITLE, status="missing", found=found, settles=settles)
    if lacking := Envelope.of(spec).missing(counts, claimed):
        words = [_words(one) for one in lacking[:_MOST_WORDS]]
        more = f" and {len(lacking) - _MOST_WORDS} more" if len(lacking) > _MOST_WORDS else ""
        found = f"in some layer no call was compared with {', '.join(words)}{more}; {line}"
        return Check(id=CHECK, title=_TITLE, status="missing", found=found, settles=_settles(lacking, counts.limits))
    calls = " and ".join(f"{len(counts.layers(phase))} layers in {phase}" for phase in claimed)
    return Check(id=CHECK, title=_TITLE, status="ok", found=f"{calls}; {line}")


def _words(one: Missing) -> str:
    title = (
        f"an end against borders of {BORDER_TOKENS} tokens"
        if one.quantity == "border"
        else ENVELOPE[one.quantity].title
    )
    return f"{one.phase}: {title} {one.label}"


def _settles(lacking: Sequence[Missing], limits: EngineLimits | None) -> str:
    if {one.phase for one in lacking} == {"decode"}:
        return (
            "run without CUDA graphs (--disable-cuda-graph), where the shadow sees decode; or set envelope_tokens lower"
        )
    if limits is not None and not limits.prefix_cache:
        return "keep the prefix cache on (without --disable-radix-cache)"
    return "run again, or set envelope_tokens to what the engine can reach; see the servers' logs"
