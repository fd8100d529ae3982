"""The served envelope: lengths of the candidate's own server, and what its answers decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from assay.evals.envelope_load import LoadRequest, envelope_load
from assay.harness.config import make_spec
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts
from assay.harness.evidence.records import Answer, Token
from assay.harness.judge.answers import Pair, envelope_pairs
from assay.harness.judge.envelope import _served_envelope, claim
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.greedy_suite import _compare_envelope, _with_envelope
from assay.harness.judge.report import EnvelopeResult
from assay.harness.sides import Role
from assay.harness.verdict import Check
from assay.reports.words import envelope_lines

LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)
POLICY = make_spec({"envelope_tokens": 512}).policy
ENVELOPE, LINE = Envelope.of(512, "cpu"), POLICY.line("envelope_tokens")
BOTH = ["extend", "decode"]
LOAD = envelope_load(ENVELOPE.reach(LIMITS), 9, 1031, "seed")
REQUESTS = [one for wave in LOAD.waves for one in wave]


def answers(say: Callable[[Role, LoadRequest], Iterable[str]] = lambda role, one: ["7"] * one.output) -> list[Answer]:
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


def admissions(requests: Iterable[LoadRequest] = REQUESTS) -> list[Admission]:
    """What the candidate's server admits, each prompt in chunks."""
    found = []
    for one in requests:
        for prefix in range(one.cached, len(one.ids), 512):
            new = min(512, len(one.ids) - prefix)
            found.append(Admission(process=1, rids=(f"candidate {one.title}",), new=(new,), prefix=(prefix,)))
    return found


def judged(
    made: Iterable[Answer], admitted: Iterable[Admission], compared: EnvelopeCounts | None, suites: str = "greedy,layers"
) -> Judged:
    """What is claimed of an envelope that the shadow and the candidate's own server answered so."""
    run = SimpleNamespace(
        spec=make_spec({"envelope_tokens": 512, "device": "cpu", "suites": suites}), envelope=compared, claimed=BOTH,
        folder=SimpleNamespace(admissions=lambda role: list(admitted)), over_envelope=envelope_pairs(list(made)),
        counts={"candidate": ()}, errors=None,
    )  # fmt: skip
    return claim(cast(RunEvidence, run))


def check_served(made: Iterable[Answer], admitted: Iterable[Admission]) -> Check:
    return judged(made, admitted, EnvelopeCounts(limits=LIMITS)).checks[1]


def served(made: list[Answer], admitted: list[Admission]) -> EnvelopeCounts:
    return _served_envelope(LIMITS, envelope_pairs(made), admitted)


def test_the_whole_load_serves_the_envelope() -> None:
    check = check_served(answers(), admissions())
    assert (check.status, check.found) == ("ok", f"{len(REQUESTS)} answers; {LINE}")


def test_a_server_that_saw_short_prompts_alone_is_no_pass_and_says_what_it_served() -> None:
    """What every run was until the candidate's own server got the requests too: it saw 158 tokens."""
    check = check_served(answers(), admissions(one for one in REQUESTS if len(one.ids) <= 158))
    assert check.status == "missing"
    assert "extend: total length 130 to 512" in check.found


def test_what_follows_the_first_token_that_differs_is_not_compared() -> None:
    def say(role: Role, one: LoadRequest) -> list[str]:
        return ["8" if role == "candidate" else "7", *["7"] * (one.output - 1)]

    check = check_served(answers(say), admissions())
    assert check.status == "missing"
    assert "decode: total length 2 to 512" in check.found


def test_without_answers_nothing_is_served() -> None:
    assert check_served((), admissions()).status == "missing"
    assert judged((), (), None, suites="layers").checks[1].status == "not checked"


def test_processes_that_share_the_heads_of_a_layer_count_once() -> None:
    twice = [one.model_copy(update={"process": process}) for one in admissions() for process in (1, 2)]
    assert served(answers(), twice) == served(answers(), admissions())


def test_the_report_states_both_envelopes() -> None:
    short = admissions(one for one in REQUESTS if len(one.ids) <= 158)
    result = judged(answers(), short, served(answers(), admissions())).parts["envelope"]
    assert isinstance(result, EnvelopeResult)
    assert result.reached["extend"]["total-tokens"] >= 512
    assert result.served_reached["extend"]["total-tokens"] == 129
    shadow, own, *_ = envelope_lines(result)
    assert "decode at 2 to 517 tokens" in shadow
    assert "to 129 in all" in own


def texts(wrong: int) -> Sequence[Pair]:
    """Answers of which so many differ."""
    titles = {one.title for one in REQUESTS[:wrong]}
    return envelope_pairs(answers(lambda role, one: ["8" if role == "candidate" and one.title in titles else "7"] * one.output))


def combined(wrong: int, *, trusted: bool = True) -> tuple[str, str]:
    pairs = texts(wrong)
    _, beyond = _compare_envelope(pairs, 0.0, 0.5)
    return _with_envelope("pass", "Texts agree.", pairs, beyond, POLICY, trusted=trusted)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "pass"), (1, "inconclusive"), (30, "regression")])
def test_one_answer_beyond_noise_rules_out_a_pass_and_a_share_is_a_regression(wrong: int, verdict: str) -> None:
    found, why = combined(wrong)
    assert found == verdict
    assert (f"{wrong} of {len(REQUESTS)} answers over the envelope differ" in why) == bool(wrong)
    assert combined(30, trusted=False)[0] == "inconclusive"


def test_equal_tokens_are_compared_by_their_log_probabilities() -> None:
    (one, *_) = texts(0)
    changed = tuple(token.model_copy(update={"logprob": -2.0}) for token in one.candidate.tokens)
    pair = Pair(one.item, one.reference, one.candidate.model_copy(update={"tokens": changed}))
    assert _compare_envelope([pair], 0.0, 0.5) == ([], [pair])
