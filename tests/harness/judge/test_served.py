"""The served envelope: lengths of the candidate's own server, and what its answers decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from assay.evals.envelope_load import Request, envelope_load
from assay.harness.compare.answers import Pair
from assay.harness.config import make_spec
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts
from assay.harness.evidence.records import Answer, Token
from assay.harness.judge.envelope import check_served, envelope_result
from assay.harness.judge.envelope_texts import EnvelopeTexts
from assay.harness.judge.served import ServedEnvelope, envelope_pairs, served_envelope
from assay.harness.sides import Role

LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)
POLICY = make_spec({"envelope_tokens": 512}).policy
ENVELOPE, LINE = Envelope.of(512, "cpu"), POLICY.line("envelope_tokens")
SUITES = ("greedy", "layers")
BOTH = ["extend", "decode"]
LOAD = envelope_load(ENVELOPE.reach(LIMITS), 9, 1031, "seed")
REQUESTS = [one for wave in LOAD.waves for one in wave]


def answers(say: Callable[[Role, Request], Iterable[str]] = lambda role, one: ["7"] * one.output) -> list[Answer]:
    return [
        Answer(
            suite="envelope", role=role, item=one.title, prompt_hash=one.title, request_id=f"{role} {one.title}", text="7",
            parsed=None, finish_reason="length", prompt_tokens=len(one.ids), completion_tokens=one.output, latency_s=1.0,
            tokens=tuple(_token(text) for text in say(role, one)),
        )
        for role in ("reference", "candidate")
        for one in REQUESTS
    ]  # fmt: skip


def _token(text: str) -> Token:
    """A token that the server prefers to the other one by 16 nats."""
    return Token(text=text, logprob=-1e-7, top=((text, -1e-7), ("7" if text == "8" else "8", -16.0)))


def admissions(requests: Iterable[Request] = REQUESTS) -> list[Admission]:
    """What the candidate's server admits, each prompt in chunks."""
    found = []
    for one in requests:
        for prefix in range(one.cached, len(one.ids), 512):
            new = min(512, len(one.ids) - prefix)
            found.append(Admission(process=1, rids=(f"candidate {one.title}",), new=(new,), prefix=(prefix,)))
    return found


def served(made: list[Answer], admitted: list[Admission]) -> ServedEnvelope:
    found = served_envelope(LIMITS, envelope_pairs(made), admitted, [])
    assert found is not None
    return found


def test_the_whole_load_serves_the_envelope() -> None:
    found = served(answers(), admissions())
    assert check_served(ENVELOPE, LINE, SUITES, EnvelopeCounts(limits=LIMITS), found, BOTH).status == "ok"
    assert found.answers == len(REQUESTS)


def test_a_server_that_saw_short_prompts_alone_is_no_pass_and_says_what_it_served() -> None:
    """What every run was until the candidate's own server got the requests too: it saw 158 tokens."""
    found = served(answers(), admissions(one for one in REQUESTS if len(one.ids) <= 158))
    check = check_served(ENVELOPE, LINE, SUITES, EnvelopeCounts(limits=LIMITS), found, BOTH)
    assert check.status == "missing"
    assert "extend: total length 130 to 512" in check.found


def test_what_follows_the_first_token_that_differs_is_not_compared() -> None:
    def say(role: Role, one: Request) -> list[str]:
        return ["8" if role == "candidate" else "7", *["7"] * (one.output - 1)]

    check = check_served(
        ENVELOPE, LINE, SUITES, EnvelopeCounts(limits=LIMITS), served(answers(say), admissions()), BOTH
    )
    assert check.status == "missing"
    assert "decode: total length 2 to 512" in check.found


def test_without_answers_nothing_is_served() -> None:
    assert served_envelope(LIMITS, [], admissions(), []) is None
    assert check_served(ENVELOPE, LINE, SUITES, EnvelopeCounts(limits=LIMITS), None, BOTH).status == "missing"
    assert check_served(ENVELOPE, LINE, ("layers",), None, None, BOTH).status == "not checked"


def test_processes_that_share_the_heads_of_a_layer_count_once() -> None:
    twice = [one.model_copy(update={"process": process}) for one in admissions() for process in (1, 2)]
    assert served(answers(), twice).counts == served(answers(), admissions()).counts


def test_the_report_states_both_envelopes() -> None:
    short = served(answers(), admissions(one for one in REQUESTS if len(one.ids) <= 158))
    compared = served(answers(), admissions()).counts
    result = envelope_result(ENVELOPE, LINE, compared, ["extend"], short)
    assert result is not None
    assert result.reached["extend"]["total-tokens"] >= 512
    assert result.served_reached["extend"]["total-tokens"] == 129
    assert "in all" in result.served
    assert result.served != result.sentence


def texts(wrong: int) -> EnvelopeTexts:
    titles = {one.title for one in REQUESTS[:wrong]}
    pairs = envelope_pairs(
        answers(lambda role, one: ["8" if role == "candidate" and one.title in titles else "7"] * one.output)
    )
    return EnvelopeTexts(pairs, 0.0, 0.5, POLICY)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "pass"), (1, "inconclusive"), (30, "regression")])
def test_one_answer_beyond_noise_rules_out_a_pass_and_a_share_is_a_regression(wrong: int, verdict: str) -> None:
    found, why = texts(wrong).combined("pass", "Texts agree.", trusted=True)
    assert found == verdict
    assert (f"{wrong} of {len(REQUESTS)} answers over the envelope differ" in why) == bool(wrong)
    assert texts(30).combined("pass", "Texts agree.", trusted=False)[0] == "inconclusive"


def test_equal_tokens_are_compared_by_their_log_probabilities() -> None:
    (one, *_) = texts(0).pairs
    changed = tuple(token.model_copy(update={"logprob": -2.0}) for token in one.candidate.tokens)
    pair = Pair(one.item, one.reference, one.candidate.model_copy(update={"tokens": changed}))
    assert EnvelopeTexts([pair], 0.0, 0.5, POLICY).beyond == [pair]
