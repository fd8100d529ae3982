"""What is said of servers: whose kernels ran in them, and whether they differed in the treatment alone."""

from __future__ import annotations

import pytest

from assay.harness.judge.call_counts import CallSummary
from assay.harness.statement import Statement, state
from assay.harness.verdict import Requirement
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import say
from assay.reports.wording.servers import counted_calls

RAN = [("_attn_fwd", 8), ("quant_per_block_int8_kernel", 4)]
SDPA = [("aten::scaled_dot_product_attention", 8)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (state("own-kernel-called", kernel="mine kernel", calls=2000, layers=4), "mine kernel 2,000 calls in 4 layers"),
        (
            state("others-called", phase="extend", kernel="mine", calls=20, others=[("triton", 4), ("torch", 1)]),
            "mine 20 calls, but also triton 4 calls, torch 1 calls",
        ),
        (state("layers-lacking", kernel="mine", ran=3, layers=4, lacking=[3]), "mine ran in 3 of 4 layers; not in [3]"),
        (
            state("decode-calls", shares=[("reference", 10, 19), ("candidate", 91, 100)], least=0.5),
            "10 of 19 decode calls of the reference, 91 of 100 decode calls of the candidate; more than 50 % of each are needed",
        ),
        (state("kernels-ran", ran=RAN), "ran: _attn_fwd (8), quant_per_block_int8_kernel (4)"),
        (
            state("kernels-ran", ran=[("x" * 100, 9), *(("y", 1),) * 4]),
            f"ran: {'x' * 80}…, y (1), y (1), y (1) and 1 more",
        ),
        (
            state("own-kernels-lacking", names=["^_attn_fwd$"], phase="extend", cached_prefix=False, ran=SDPA),
            "none of ^_attn_fwd$ ran in extend without a cached prefix; ran: aten::scaled_dot_product_attention (8)",
        ),
        (
            state("declared-never-ran", names=["^a$", "^b$"], ran=[]),
            "declared, but did not run: ^a$, ^b$; nothing ran",
        ),
        (
            state("reference-ran-candidates", names=["_attn_fwd"]),
            "the reference ran the candidate's kernels: _attn_fwd",
        ),
        (
            state("kernels-not-named", noise="int8_qk", package="sage", ran=SDPA),
            "it declares the quantisation int8_qk and the package sage, but no names of kernels that would prove it; "
            "ran: aten::scaled_dot_product_attention (8)",
        ),
        (
            state("kernels-not-named", noise="", package="", ran=[]),
            "it declares no names of kernels; nothing ran",
        ),
        (state("no-pass-traced", phase="decode", of_reference=True), "no decode pass of the reference was traced"),
        (
            state("servers-agree", stored=False, arguments=212, parts=2),
            "one model folder; 212 server arguments agree; what they served agrees in 2 parts",
        ),
        (
            state("servers-agree", stored=True, arguments=1, parts=None),
            "the stored reference and the candidate have one model hash; 1 server arguments agree; "
            "what they served was not observed",
        ),
        (
            state("served-otherwise", said=["torch is 1 in A, 2 in B", "x"]),
            "of what they served (A the reference, B the candidate), torch is 1 in A, 2 in B; x",
        ),
        (
            state("other-backend-ran", other=[("candidate", "triton", "sage_attn")]),
            "the candidate was to be triton, and its server ran sage_attn",
        ),
        (state("calls-agree", passes=[190, 1190], requests=[190, 190]),
         "190 and 1,190 prefill passes in every layer, 190 and 190 answered requests"),
        (
            state("no-request-admitted", roles=["reference", "candidate"]),
            "no admitted request was noted in the server of the reference or the candidate",
        ),
        (state("answers-parsed", answers=320, otherwise=0), "320 of 320 letters are those of the texts"),
        (
            state("answers-parsed", answers=320, otherwise=160),
            "160 of 320 answers were recorded with another letter than their text gives",
        ),
    ],
)  # fmt: skip
def test_what_a_check_found(found: Statement, said: str) -> None:
    assert say(found) == said


def test_what_resolves_a_check_is_said_with_what_was_found() -> None:
    lacking = state("no-call-counted", phase="extend", backend="mine")
    check = said_check(Requirement("kernel-ran").of("extend").check("missing", lacking))
    assert check.found == "no extend call of mine was counted"
    assert check.settles == "run so that mine computes extend; see candidate.log for what ran instead"


def test_what_both_servers_were_given_follows_what_was_found() -> None:
    differ = state("arguments-differ", arguments=[("dtype", "a", "b")], asked=["backend"])
    given = state("with-common-settings", outcome=differ, because=["both were given it"], impossible=["dtype (a; b)"])
    check = said_check(Requirement("same-servers").check("failed", given))
    assert check.found == "dtype: a against b; both were given it; not made equal: dtype (a; b)"
    assert check.settles == "run again so that only backend differs"


def test_the_first_disagreements_are_said_by_role() -> None:
    first = [
        ("reference", state("prefill-calls", layer=0, cached_prefix=True, calls=0, passes=174)),
        ("candidate", state("requests-not-admitted", count=3, answers=190, first="mmlu-1")),
        ("candidate", state("too-few-decode-calls", layer=2, calls=1, tokens=4000, needed=1000)),
    ]
    assert say(state("calls-disagree", first=first, more=2)) == (
        "reference: layer 0 with a cached prefix: 0 calls in 174 passes; "
        "candidate: 3 of 190 answered requests were not admitted, the first mmlu-1; "
        "candidate: layer 2: 1 decode calls, but the answers' 4,000 further tokens took at least 1,000; and 2 more"
    )


def test_counted_calls() -> None:
    extend = CallSummary(phase="extend", kernel="triton", backend="triton", calls=12, calls_with_cached_prefix=0, layers=2)
    decode = extend.model_copy(update={"phase": "decode", "calls": 24, "calls_in_graphs": 6, "calls_compiled": 14})
    assert counted_calls(extend) == "extend: triton 12 calls"
    assert counted_calls(decode) == "decode: triton 24 calls, 6 of them in CUDA graphs, 14 of them compiled"
