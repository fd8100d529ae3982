"""The coverage of a pass: the counted conditions of the compared calls, against the policy's envelope."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from assay.harness.conditions import BATCHES, BORDER_TOKENS, ENVELOPE, ENVELOPE_OF, GRAPH, PHASES
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts, Missing, Ranges, in_words, stood_for
from assay.harness.evidence.envelope_counting import EnvelopeCounting
from assay.harness.judge.answers import Pair
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.greedy_texts import first_divergence
from assay.harness.judge.report import EnvelopeResult, EnvelopeRow
from assay.harness.judge.requirements import REQUIRED
from assay.harness.text import counted, few, listed
from assay.harness.verdict import Check

_MOST_WORDS = 4
_IN_GRAPH = (GRAPH.id, *GRAPH.labels)
_FEATURES = {
    "window": "sliding windows", "softcap": "logit caps", "sinks": "attention sinks", "temperature": "an attention temperature",
}  # fmt: skip
"""Features of calls, in words."""
_NEVER = ("cross attention", "latent KV caches")
"""Attention that no compared call has."""


def claim(run: RunEvidence) -> Judged:
    """Check that the policy's envelope was covered, in the shadow and as served, and describe what was."""
    policy = run.spec.policy
    envelope, line = Envelope.of(policy.envelope_tokens, run.spec.device), policy.line("envelope_tokens")
    served = _served(run)
    result = _result(run, served, envelope, line)
    checks = [_check_covered(run, envelope, line), _check_served(run, served, envelope, line)]
    return Judged(checks=checks, parts={"envelope": result} if result else {})


def _result(run: RunEvidence, served: EnvelopeCounts | None, envelope: Envelope, line: str) -> EnvelopeResult | None:
    """Determine what a verdict covers; None where no call was compared."""
    counts = run.envelope
    if counts is None or counts.limits is None or not counts.calls:
        return None
    phases = [phase for phase in PHASES if phase in run.claimed]
    reached = _reached(envelope, counts, counts.limits, phases)
    features = [
        name
        for name in _FEATURES
        if run.errors is not None and any(name in header.features for header in run.errors.headers)
    ]
    return EnvelopeResult(
        policy=line,
        sentence=_sentence(envelope, counts, counts.limits, phases) + _with(features),
        served=_sentence(envelope, served, counts.limits, phases, shadow=False) + _graphs(run) if served else "",
        reached=reached,
        served_reached=_reached(envelope, served, counts.limits, phases) if served else {},
        gaps=tuple(_words(missing) for missing in envelope.gaps(counts, phases)),
        rows=tuple(_rows(envelope.kinds(counts.limits), counts, phases)),
        not_covered=(*_outside(counts, counts.limits, reached, phases), _lacking(features), "speculative decoding"),
    )


def _with(features: Sequence[str]) -> str:
    """Add what compared calls asked for beyond plain attention; empty for nothing."""
    return f"; layers have {listed([_FEATURES[name] for name in features])}" if features else ""


def _lacking(features: Collection[str]) -> str:
    """Name the attention that no compared call had."""
    rare = {"temperature"}  # is named only where it is
    lacking = [words for name, words in _FEATURES.items() if name not in rare | set(features)]
    return f"attention that this model's calls lack: {', '.join((*lacking, *_NEVER))}"


def _in_graphs(counts: EnvelopeCounts, phase: str) -> str:
    """Add how many of the compared calls of a phase CUDA graphs served; empty if none."""
    of_graphs = counts.count(phase, *_IN_GRAPH)
    calls = sum(counts.count(phase, "batch", label) for label in BATCHES.labels)
    return f", {'all' if of_graphs == calls else 'some'} of them in CUDA graphs" if of_graphs else ""


def _graphs(run: RunEvidence) -> str:
    """Add to the lengths that were served that the candidate's server replays CUDA graphs in decode; empty if it does not."""
    captured = [
        count for count in run.counts["candidate"] if count.captured and count.phase == "decode" and count.calls
    ]
    return ", in CUDA graphs" if captured and "decode" in run.claimed else ""


def _rows(
    kinds: Mapping[str, Mapping[str, Collection[str]]], counts: EnvelopeCounts, phases: Sequence[str]
) -> Iterator[EnvelopeRow]:
    """List the conditions that were compared or are wanted, of the `kinds` of an envelope."""
    for phase in phases:
        for quantity in ENVELOPE_OF[phase]:
            for label in ENVELOPE[quantity].labels:
                calls, wanted = counts.count(phase, quantity, label), label in kinds[phase].get(quantity, ())
                if calls or wanted:
                    yield EnvelopeRow(
                        phase=phase,
                        condition=quantity,
                        title=ENVELOPE[quantity].title,
                        label=label,
                        calls=calls,
                        wanted=wanted,
                    )


def _reached(
    envelope: Envelope, counts: EnvelopeCounts, limits: EngineLimits, phases: Sequence[str]
) -> dict[str, dict[str, int]]:
    reached: dict[str, dict[str, int]] = {}
    for phase in phases:
        known = _compared(envelope, counts, limits, phase)
        wanted = envelope.reach(limits).lengths[phase]
        # Without a gap: a length beyond one says nothing of those in it.
        lengths = {
            quantity: next((last for first, last in ranges if first <= wanted[quantity][0] <= last), 0)
            for quantity, ranges in known.items()
        }
        others = [quantity for quantity in ("batch", "depth") if quantity in ENVELOPE_OF[phase]]
        reached[phase] = lengths | {other: counts.reached(phase, other) for other in others}
    return reached


def _compared(envelope: Envelope, counts: EnvelopeCounts, limits: EngineLimits, phase: str) -> dict[str, Ranges]:
    """Return id of a condition -> the lengths that were compared, and those that these stand for."""
    wanted = envelope.reach(limits).lengths[phase]
    return {quantity: stood_for(counts.values(phase, quantity), points) for quantity, points in wanted.items()}


def _sentence(
    envelope: Envelope, counts: EnvelopeCounts, limits: EngineLimits, phases: Sequence[str], *, shadow: bool = True
) -> str:
    parts = []
    at = {phase: _compared(envelope, counts, limits, phase) for phase in phases}
    if "extend" in phases:
        words = {quantity: in_words(ranges) for quantity, ranges in at["extend"].items()}
        parts.append(
            f"prefill at {words['new-tokens']} new tokens, at {words['new-behind-prefix']} behind a cached prefix, at "
            f"{words['prefix-tokens']} cached and at {words['total-tokens']} in all"
        )
    if "decode" in phases:
        depth = f" and to a depth of {counts.reached('decode', 'depth'):,}"
        parts.append(f"decode at {in_words(at['decode']['total-tokens'])} tokens{depth}")
    if shadow:
        parts = [
            f"{part}, in batches of up to {counts.reached(phase, 'batch'):,}" + _in_graphs(counts, phase)
            for part, phase in zip(parts, at, strict=True)
        ]
    return "; ".join(parts if "decode" in phases else [*parts, "decode is the reference's"])


_WITHOUT_GRAPHS = "the servers ran it without"
_NOT_OBSERVED = "calls were compared in passes without; what graphs answered is compared as text"


def _outside(
    counts: EnvelopeCounts, limits: EngineLimits, reached: dict[str, dict[str, int]], phases: Sequence[str]
) -> list[str]:
    """Describe what lies outside of the counted conditions."""
    outside = []
    for phase, values in reached.items():
        more = {
            "new-tokens": "more than {} new tokens at once",
            "new-behind-prefix": "more than {} new tokens at once behind a cached prefix",
            "prefix-tokens": "a cached prefix of more than {} tokens",
            "total-tokens": "sequences of more than {} tokens",
            "batch": "batches of more than {}",
            "depth": "answers of more than {} tokens",
        }
        outside += [f"{phase}: {more[quantity].format(f'{value:,}')}" for quantity, value in values.items()]
    if "decode" not in phases:
        outside.append("decode by the candidate: it claims none")
    if "extend" in phases and not counts.count("extend", "chunk", "later chunk"):
        at_once = (
            f", which starts beyond {limits.chunk_tokens:,} tokens" if limits.chunk_tokens else ": it is switched off"
        )
        outside.append(f"extend: chunked prefill{at_once}")
    elif "extend" in phases and not counts.count("extend", "chunk", "later chunk of full length"):
        outside.append("extend: a later chunk of full length")
    if "extend" in phases and not counts.count("extend", "mix", "extend and decode"):
        why = "no such call was made" if limits.mixed else "the servers ran without --enable-mixed-chunk"
        outside.append(f"extend and decode in one call: {why}")
    outside += [
        f"{phase} in CUDA graphs: {_WITHOUT_GRAPHS if limits.graphs[phase] == 'disabled' else _NOT_OBSERVED}"
        for phase in phases
        if phase in limits.graphs and not counts.count(phase, *_IN_GRAPH)
    ]
    outside.append(f"page sizes other than {limits.page_tokens}")
    return outside


def _check_covered(run: RunEvidence, envelope: Envelope, line: str) -> Check:
    """Check that every layer was compared under every condition of the policy's envelope, in each claimed phase."""
    counts = run.envelope
    if "layers" not in run.spec.workload.suites:
        return REQUIRED["envelope-covered"].check(
            "not checked", f"the suite layers was not requested; {line}", "add layers to --suites"
        )
    if counts is None or not run.claimed:
        settles = "let assay start the servers, without a URL"
        return REQUIRED["envelope-covered"].check("missing", f"no compared call was counted; {line}", settles)
    if lacking := envelope.missing(counts, run.claimed):
        observed = f"in some layer no call was compared with {_some_words(lacking)}; {line}"
        return REQUIRED["envelope-covered"].check("missing", observed, _settles(lacking, counts.limits))
    calls = " and ".join(f"{len(counts.layers(phase))} layers in {phase}" for phase in run.claimed)
    return REQUIRED["envelope-covered"].check("ok", f"{calls}; {line}")


def _check_served(run: RunEvidence, served: EnvelopeCounts | None, envelope: Envelope, line: str) -> Check:
    """Check that the candidate's own server answered, and was compared, with every length of the policy's envelope."""
    counts = run.envelope
    if lacking := [suite for suite in ("layers", "greedy") if suite not in run.spec.workload.suites]:
        observed = (
            f"without the suite {listed(lacking)} the candidate's server answers no requests of the envelope; {line}"
        )
        return REQUIRED["envelope-served"].check("not checked", observed, f"add {listed(lacking)} to --suites")
    if counts is None or counts.limits is None or served is None or not run.claimed:
        observed = f"no answer of the candidate's own server to the envelope's requests was compared; {line}"
        return REQUIRED["envelope-served"].check("missing", observed, "let assay start the servers, without a URL")
    if missing := envelope.gaps(served, run.claimed):
        observed = f"no answer was compared with {_some_words(missing)}; {line}"
        return REQUIRED["envelope-served"].check("missing", observed, _settles(missing, counts.limits))
    return REQUIRED["envelope-served"].check("ok", f"{counted(len(run.over_envelope), 'answer')}; {line}")


def _some_words(lacking: Sequence[Missing]) -> str:
    return few([_words(missing) for missing in lacking], _MOST_WORDS)


def _words(missing: Missing) -> str:
    phase, quantity, label = missing
    border = f"an end against borders of {BORDER_TOKENS} tokens"
    return f"{phase}: {border if quantity == 'border' else ENVELOPE[quantity].title} {label}"


def _settles(lacking: Sequence[Missing], limits: EngineLimits | None) -> str:
    if {phase for phase, _, _ in lacking} == {"decode"}:
        return (
            "run without CUDA graphs (--disable-cuda-graph), where the shadow sees decode; or set envelope_tokens lower"
        )
    if limits is not None and not limits.prefix_cache:
        return "keep the prefix cache on (without --disable-radix-cache)"
    return "run again, or set envelope_tokens to what the engine can reach; see the servers' logs"


_ANY_LAYER = 0
"""A request passes through all layers, so one stands for them."""


def _served(run: RunEvidence) -> EnvelopeCounts | None:
    """Count what the candidate's own server answered over the envelope; None where no such answer is compared."""
    if run.envelope is None or run.envelope.limits is None or not run.over_envelope:
        return None
    return served_envelope(run.envelope.limits, run.over_envelope, run.folder.admissions("candidate"))


def served_envelope(
    limits: EngineLimits, pairs: Sequence[Pair], admissions: Iterable[Admission]
) -> EnvelopeCounts | None:
    """Count the passes of the candidate's own server by condition, as of one layer; None where no answer is compared.

    The batches of decode are not known.

    Args:
        limits: the engine's limits.
        pairs: answers of both roles with the log-probabilities of their tokens.
        admissions: the prefill batches of the candidate's server, in order.
    """
    if not pairs:
        return None
    counting = EnvelopeCounting(limits)
    _count_extend(counting, {both.candidate.request_id for both in pairs}, admissions)
    for both in pairs:
        for step in range(_compared_tokens(both) - 1):
            length = both.candidate.prompt_tokens + step
            counting.count("decode", _ANY_LAYER, counting.decode([length], [both.candidate.request_id]))
    return counting.counts("")


def _count_extend(counting: EnvelopeCounting, compared: Collection[str], admissions: Iterable[Admission]) -> None:
    """Count the prefill batches of the requests whose answers are compared."""
    seen = set()
    for batch in admissions:
        passed = (batch.rids, batch.new, batch.prefix)
        rows = [row for row, rid in enumerate(batch.rids) if rid in compared]
        if not rows or passed in seen:  # processes that share the heads of a layer admit the same batches
            continue
        seen.add(passed)
        new, prefix = ([lengths[row] for row in rows] for lengths in (batch.new, batch.prefix))
        counting.count("extend", _ANY_LAYER, counting.extend(new, prefix, [batch.rids[row] for row in rows]))


def _compared_tokens(both: Pair) -> int:
    """Count the tokens of the candidate's answer whose history is that of the reference's, the first differing one included."""
    tokens = both.candidate.tokens
    parting = first_divergence(both.reference.tokens, tokens)
    return len(tokens) if parting is None else min(parting + 1, len(tokens))
