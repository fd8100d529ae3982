"""What a verdict covers: counted conditions against the policy's envelope, in the shadow and in the candidate's own server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from assay.evals.envelope_load import LoadRequest, decode_load, envelope_load
from assay.harness.config import make_spec
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts, ranges_of
from assay.harness.evidence.records import Answer, Token
from assay.harness.judge.answers import Pair, envelope_pairs
from assay.harness.judge.decide import decide
from assay.harness.judge.envelope import _served_envelope, claim
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.greedy_suite import _compare_envelope, _with_envelope
from assay.harness.judge.report import EnvelopeResult
from assay.harness.run.envelope import lengths_again
from assay.harness.sides import Role
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check
from assay.reports.wording.envelope import _outside

LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)


ENVELOPE = Envelope.of(512, "cpu")
POLICY = make_spec({"envelope_tokens": 512}).policy
BOTH = ["extend", "decode"]
LOAD = envelope_load(ENVELOPE.reach(LIMITS), 9, 1031, "seed")
REQUESTS = [one for wave in LOAD.waves for one in wave]


def judged(
    compared: EnvelopeCounts | None, phases: Sequence[str] = BOTH, made: Iterable[Answer] = (), admitted: Iterable[Admission] = (),
    effects: Sequence[tuple[int, str, str, bool]] = (), operations: Sequence[tuple[str, str]] = (), **flags: Any,
) -> Judged:  # fmt: skip
    """What is claimed of an envelope that the shadow compared, and the candidate's own server answered, so."""
    headers = [SimpleNamespace(features=tuple({name for _, _, name, _ in some}), effects=some) for some in (effects, effects[1:])]
    resolved = [SimpleNamespace(operation=operation, layers=layers) for operation, layers in operations]
    run = SimpleNamespace(
        fingerprints={"candidate": SimpleNamespace(backends=resolved)}, servers={}, measured=("reference", "candidate"),
        spec=make_spec({"envelope_tokens": 512, "device": "cpu", **flags}), envelope=compared, claimed=phases,
        urls=(), folder=SimpleNamespace(admissions=lambda role: list(admitted)), over_envelope=envelope_pairs(list(made)),
        counts={"candidate": ()}, errors=SimpleNamespace(headers=headers),
    )  # fmt: skip
    return claim(cast(RunEvidence, run))


def claimed(counts: EnvelopeCounts | None, phases: Sequence[str], **more: Any) -> tuple[Check, EnvelopeResult | None]:
    """The check that the envelope was covered, and what a report says of it."""
    made = judged(counts, phases, **more)
    return made.checks[0], cast(EnvelopeResult | None, made.parts.get("envelope"))


def checked(counts: EnvelopeCounts | None, phases: Sequence[str], **flags: Any) -> Check:
    return claimed(counts, phases, **flags)[0]


def missing(check: Check) -> list[tuple[str, str, Any]]:
    """What a check says is lacking: phase, condition, and lengths, value or label."""
    return [tuple(one.values.values()) for one in check.outcome.values["lacking"]]


def counted(limits: EngineLimits = LIMITS, phases: tuple[str, ...] = ("extend",), layers: int = 4) -> EnvelopeCounts:
    """The counts of a run that covers the envelope of the default policy exactly."""
    calls = {
        phase: {
            quantity: {label: dict.fromkeys(range(layers), 2) for label in labels}
            for quantity, labels in ENVELOPE.kinds(limits)[phase].items()
        }
        for phase in phases
    }
    met = {
        phase: {quantity: dict.fromkeys(range(layers), ranges_of(points)) for quantity, points in _points(limits, phase).items()}
        for phase in phases
    }
    return EnvelopeCounts(limits=limits, calls=calls, met=met)


def _points(limits: EngineLimits, phase: str) -> dict[str, Iterable[int]]:
    wanted = ENVELOPE.reach(limits).lengths[phase]
    return {
        **{quantity: range(points[0], points[-1] + 1) for quantity, points in wanted.items()},
        "batch": [1, ENVELOPE.batch],
        "depth": range(1, ENVELOPE.depth + 1),
    }


def meeting(quantity: str, lengths: Iterable[int], phase: str = "extend", layer: int | None = None) -> EnvelopeCounts:
    """The counts of a run whose calls had these lengths alone, in one layer or in all."""
    changed = counted(phases=("extend", "decode")).model_copy(deep=True)
    layers = changed.met[phase][quantity]
    layers.update(dict.fromkeys(layers if layer is None else [layer], ranges_of(lengths)))
    return changed


def without(counts: EnvelopeCounts, quantity: str, label: str, layer: int | None = None) -> EnvelopeCounts:
    """The same without the calls of a condition, in one layer or in all."""
    changed = counts.model_copy(deep=True)
    by_layer = changed.calls["extend"][quantity][label]
    for number in list(by_layer) if layer is None else [layer]:
        del by_layer[number]
    return changed


def test_what_the_policy_wants_is_covered() -> None:
    check = checked(counted(), ["extend"])
    line = "envelope_tokens = 512 (--envelope-tokens)"
    assert (check.status, check.outcome) == ("ok", state("envelope-covered", layers=[["extend", 4]], line=line))


@pytest.mark.parametrize(
    ("quantity", "label"),
    [("batch", "9-32"), ("chunk", "later chunk"), ("chunk", "later chunk of full length"), ("border", "on it"),
     ("mix", "some with a prefix")],
)  # fmt: skip
def test_a_condition_that_one_layer_lacks_is_no_pass(quantity: str, label: str) -> None:
    check = checked(without(counted(), quantity, label, layer=2), ["extend"])
    assert check.status == "missing"
    assert (quantity, label) in [lacking[1:] for lacking in missing(check)]
    assert decide(["pass"], [check]) == "inconclusive"


@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize(
    ("phase", "quantity", "met", "gap"),
    [
        # A backend that returns zeros for 202 to 511 cached tokens passed.
        ("extend", "prefix-tokens", [*range(1, 202), 512], (202, 511)),
        # So did one that is wrong for a chunk of more than 130 new tokens after a cached prefix.
        ("extend", "new-behind-prefix", range(1, 131), (131, 512)),
        # Decode was compared at 1 to 200 and 577 to 584, and called "decode to 584".
        ("decode", "total-tokens", [*range(1, 201), *range(577, 585)], (201, 512)),
        ("extend", "total-tokens", [one for one in range(1, 513) if one != 257], (257, 257)),
        ("extend", "new-tokens", range(2, 513), (1, 1)),
    ],
)
def test_a_gap_within_the_envelope_is_no_pass_and_is_named(
    phase: str, quantity: str, met: Iterable[int], gap: tuple[int, int], layer: int | None
) -> None:
    counts, phases = meeting(quantity, met, phase, layer), ["extend", "decode"]
    check = checked(counts, phases)
    assert check.status == "missing"
    assert missing(check) == [(phase, quantity, [list(gap)])]
    assert decide(["pass"], [check]) == "inconclusive"
    _, result = claimed(counts, phases)
    assert result is not None
    assert result.gaps == tuple(check.outcome.values["lacking"])


def test_without_counts_it_is_missing_and_without_the_suite_not_checked() -> None:
    assert checked(None, ["extend"]).status == "missing"
    assert checked(None, ["extend"], suites="accuracy").status == "not checked"


def test_what_the_engine_cannot_do_is_not_wanted_and_is_said() -> None:
    paged = EngineLimits(chunk_tokens=None, context_tokens=4096, page_tokens=64, prefix_cache=True)
    counts = counted(paged)
    assert "later chunk" not in counts.calls["extend"]["chunk"]
    assert ENVELOPE.reach(paged).lengths["extend"]["prefix-tokens"] == tuple(range(64, 513, 64))
    assert checked(counts, ["extend"]).status == "ok"


def answers(
    say: Callable[[Role, LoadRequest], Iterable[str]] = lambda role, one: ["7"] * one.output,
    requests: Iterable[LoadRequest] = REQUESTS, ending: str = "",
) -> list[Answer]:  # fmt: skip
    return [
        Answer(
            suite="envelope", role=role, item=one.title + ending, prompt_hash=one.title, request_id=f"{role} {one.title}", text="7",
            parsed=None, finish_reason="length", prompt_tokens=len(one.ids), completion_tokens=one.output, latency_s=1.0,
            tokens=tuple(_token(text) for text in say(role, one)),
        )
        for role in ("reference", "candidate")
        for one in requests
    ]  # fmt: skip


def _token(text: str) -> Token:
    """A token that the server prefers to the other one by 16 nats."""
    return Token(text=text, logprob=-1e-7, top=((text, -1e-7), ("7" if text == "8" else "8", -16.0)))


def admissions(requests: Iterable[LoadRequest] = REQUESTS) -> list[Admission]:
    """What the candidate's server admits, each prompt in chunks."""
    found = []
    for one in requests:
        for prefix in range(one.cached, len(one.ids), 512):
            new = min(512, len(one.ids) - prefix)
            found.append(Admission(process=1, rids=(f"candidate {one.title}",), new=(new,), prefix=(prefix,)))
    return found


def check_served(made: Iterable[Answer], admitted: Iterable[Admission]) -> Check:
    return judged(EnvelopeCounts(limits=LIMITS), made=made, admitted=admitted).checks[1]


def served(made: list[Answer], admitted: list[Admission]) -> EnvelopeCounts:
    return _served_envelope(LIMITS, envelope_pairs(made), admitted)


def test_a_server_that_saw_short_prompts_alone_is_no_pass_and_says_what_it_served() -> None:
    """What every run was until the candidate's own server got the requests too: it saw 158 tokens."""
    check = check_served(answers(), admissions(one for one in REQUESTS if len(one.ids) <= 158))
    assert check.status == "missing"
    assert [lengths[-1][-1] for phase, quantity, lengths in missing(check) if quantity == "total-tokens"] == [512]


def test_what_follows_the_first_token_that_differs_is_not_compared() -> None:
    def say(role: Role, one: LoadRequest) -> list[str]:
        return ["8" if role == "candidate" else "7", *["7"] * (one.output - 1)]

    check = check_served(answers(say), admissions())
    assert check.status == "missing"
    assert ("decode", "total-tokens", [[2, 512]]) in missing(check)


def tying(*places: tuple[LoadRequest, int]) -> list[Answer]:
    """Answers of a candidate that is right, and ties with the reference at these tokens of these requests."""
    ties = {one.title: place for one, place in places}

    def say(role: Role, one: LoadRequest) -> list[str]:
        return ["8" if role == "candidate" and n == ties.get(one.title) else "7" for n in range(one.output)]

    return answers(say)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_text_that_ties_early_leaves_its_lengths_to_further_prompts(place: int) -> None:
    """Two right backends were inconclusive on a GPU in each run: the same prompts tied before a border every time."""
    for wave in LOAD.decode:
        check = check_served(tying(*((one, place) for one in wave)), admissions())
        assert check.status == "ok", missing(check)


def test_right_servers_that_tie_more_often_than_on_a_gpu_are_compared_at_all_lengths_in_each_run() -> None:
    rng = np.random.default_rng(3)
    for _ in range(8):
        ties = [(one, int(rng.geometric(0.05)) - 1) for one in REQUESTS]  # 1.4 % of an H200's tokens
        assert check_served(tying(*ties), admissions()).status == "ok"


def test_lengths_that_no_text_reached_are_asked_again_until_all_are_compared() -> None:
    """On an H200, FP8 weights changed about every sixth token of random prompts, and 29 ranges stayed without an answer."""
    rng, reach, complete = np.random.default_rng(5), ENVELOPE.reach(LIMITS), [0, 0, 0]

    def say(role: Role, one: LoadRequest) -> list[str]:
        return ["8" if role == "candidate" and rng.random() < 0.25 else "7" for _ in range(one.output)]

    for seed in "abcdefgh":
        made = answers(say)
        for number in range(3):
            lengths = lengths_again(reach, served(made, admissions()))
            complete[number] += not lengths
            again = [one for wave in decode_load(reach, 1031, f"{seed}{number}", lengths)[1:] for one in wave]
            made += answers(say, again, f" {number}")
    assert complete[0] < complete[2] == 8


def test_lengths_before_which_every_prompt_ties_are_named_with_the_ties_as_cause() -> None:
    border = [one for wave in LOAD.decode for one in wave if 256 - 3 <= len(one.ids) < 256]
    check = check_served(tying(*((one, 0) for one in border)), admissions())
    assert check.status == "missing"
    assert [lacking[:2] for lacking in missing(check)] == [("decode", "total-tokens")]
    assert all(any(first <= length <= last for first, last in missing(check)[0][2]) for length in (255, 256, 257))
    assert (check.outcome.values["cause"], check.outcome.values["parted"]) == ("texts part", len(border))


def test_without_answers_nothing_is_served() -> None:
    assert check_served((), admissions()).status == "missing"
    assert judged(None, suites="layers").checks[1].status == "not checked"


def test_processes_that_share_the_heads_of_a_layer_count_once() -> None:
    twice = [one.model_copy(update={"process": process}) for one in admissions() for process in (1, 2)]
    assert served(answers(), twice) == served(answers(), admissions())


def test_the_report_states_both_envelopes() -> None:
    short = admissions(one for one in REQUESTS if len(one.ids) <= 158)
    result = judged(served(answers(), admissions()), made=answers(), admitted=short).parts["envelope"]
    assert isinstance(result, EnvelopeResult)
    assert result.reached["extend"]["total-tokens"] >= 512
    assert result.served_reached["extend"]["total-tokens"] == 129
    lengths = {n for first, last in result.compared["decode"]["total-tokens"] for n in range(first, last + 1)}
    assert lengths == {len(one.ids) + step for one in REQUESTS for step in range(1, one.output)}, "no length that no call had"
    assert result.served["extend"]["total-tokens"][-1][-1] <= 158


def test_a_feature_is_covered_where_it_changed_an_output_in_each_layer_and_phase_that_asked_for_it() -> None:
    """Processes that share the heads of a layer feel a feature together; a phase that the candidate leaves alone does not count."""
    effects = [
        (0, "extend", "window", True), (0, "extend", "window", False), (1, "extend", "window", True),
        (0, "extend", "sinks", True), (1, "extend", "sinks", False), (0, "decode", "window", False),
        (0, "extend", "softcap", False),
    ]  # fmt: skip
    made = {
        phases: cast(EnvelopeResult, judged(counted(phases=("extend", "decode")), phases, effects=effects).parts["envelope"])
        for phases in (("extend",), ("extend", "decode"))
    }
    assert made["extend",].features == ("window",)
    assert made["extend",].unfelt == {"sinks": ("extend",), "softcap": ("extend",)}
    assert made["extend", "decode"].features == ()
    assert made["extend", "decode"].unfelt["window"] == ("decode",)


def texts(wrong: int) -> Sequence[Pair]:
    """Answers of which so many differ."""
    titles = {one.title for one in REQUESTS[:wrong]}
    return envelope_pairs(answers(lambda role, one: ["8" if role == "candidate" and one.title in titles else "7"] * one.output))


def combined(wrong: int, *, trusted: bool = True) -> tuple[str, Sequence[Statement]]:
    pairs = texts(wrong)
    _, beyond = _compare_envelope(pairs, 0.0, 0.5)
    return _with_envelope("pass", [state("texts-agree")], pairs, beyond, POLICY, trusted=trusted)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "pass"), (1, "inconclusive"), (30, "regression")])
def test_one_answer_beyond_noise_rules_out_a_pass_and_a_share_is_a_regression(wrong: int, verdict: str) -> None:
    found, why = combined(wrong)
    assert found == verdict
    apart = state("envelope-answers-apart", apart=[one.title for one in REQUESTS[:wrong]], answers=len(REQUESTS))
    assert list(why) == [apart, state("texts-agree")][not wrong :]
    assert combined(30, trusted=False)[0] == "inconclusive"


def test_equal_tokens_are_compared_by_their_log_probabilities() -> None:
    (one, *_) = texts(0)
    changed = tuple(token.model_copy(update={"logprob": -2.0}) for token in one.candidate.tokens)
    pair = Pair(one.item, one.reference, one.candidate.model_copy(update={"tokens": changed}))
    assert _compare_envelope([pair], 0.0, 0.5) == ([], [pair])


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        ((), None),  # a server that reported none: nothing is known
        ((("attention", "0-3"), ("moe", "")), "kinds of layers that this model lacks: recurrent layers, experts"),
        ((("attention", "1-2"), ("linear attention", "0,3")), "kinds of layers that this model lacks: experts"),
    ],
)
def test_kinds_of_layers_are_lacking_or_were_not_compared(operations: Sequence[tuple[str, str]], said: str | None) -> None:
    _, result = claimed(counted(), BOTH, operations=operations)
    assert result is not None
    outside = list(_outside(result))
    assert [one for one in outside if one.startswith("kinds of layers")] == ([said] if said else [])
    compared = "recurrent layers: they were compared only by answers, texts and logits"
    assert (compared in outside) == (("linear attention", "0,3") in operations)


def test_a_feature_that_calls_have_is_not_said_to_lack() -> None:
    _, result = claimed(counted(), BOTH, effects=[(0, "extend", "mla", True), (0, "decode", "mla", True)])
    assert result is not None
    (lack,) = [one for one in _outside(result) if one.startswith("attention features")]
    assert "latent KV caches" not in lack
    assert "KV caches of fewer bits" in lack


@pytest.mark.parametrize("own", [{}, {"candidate_arg": ("--kv-cache-dtype=fp8_e4m3",)}])
def test_settings_that_no_shadow_had_are_not_covered(own: dict[str, Any]) -> None:
    _, result = claimed(counted(), BOTH, **own)
    assert result is not None
    assert result.not_in_shadow == (("--kv-cache-dtype",) if own else ())
    assert any("the candidate's own --kv-cache-dtype" in said for said in _outside(result)) == bool(own)
