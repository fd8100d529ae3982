"""Realistic reports for the tests of the renderers, one per verdict, and hostile ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any, Literal

from assay.evals.questions import GROUPS, Question
from assay.evals.synthetic import NAMES, THINGS, questions
from assay.harness.conditions import condition_id
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.judge.call_counts import CallSummary
from assay.harness.judge.judgement import WHOLE, measure
from assay.harness.judge.latency_result import LatencyResult, LatencyRow, LoadRow
from assay.harness.judge.report import (
    Check,
    ConditionRow,
    DepthRow,
    DivergenceRow,
    EnvelopeResult,
    EnvelopeRow,
    Environment,
    ErrorGrid,
    FailureResult,
    FaultSeen,
    Finding,
    Flip,
    KernelRow,
    LayersResult,
    LogitsRow,
    Metric,
    PassKernels,
    Report,
    SensitivityResult,
    ServerSummary,
    SuiteResult,
    Tally,
    TruthRow,
)
from assay.harness.picture import CELLS, Picture
from assay.harness.sides import Role
from assay.harness.statement import state
from assay.harness.verdict import CheckStatus, Requirement, Verdict

SAGE = "sageattention 1.0.6 (Triton interpreter)"
NATIVE = "torch_native"
QUESTIONS, FIRST_WAVE = 256, 32
REPRODUCE = "nox -s accuracy -- --candidate {candidate} --questions 256"

HOSTILE = (
    "</script></style></textarea></title><script>window.pwned=1</script>"
    "<img src=x onerror=\"window.pwned=1;document.title='pwned'\"><svg/onload=window.pwned=1>"
    '" onmouseover="window.pwned=1" x=\'y\' {{7*7}} {% raw %} ]]> --> <!-- & &lt; \\u003c | a | b |\n'
    "| --- | --- |\n```\n# heading\n@everyone #1 [link](javascript:window.pwned=1) https://evil.example www.evil.example"
    "\x1b[2J\x1b[31mred\x1b[0m\x00\x07\x08\x7f\x85\x9b31m\u202eevil\u2066\u200b\u2028\ufeff\ufffe\U000e0041\ud800 tail"
    " [bold red]markup[/bold red] [/] :smile: الله 中文 👩‍👩‍👧 é"
)


def built_in(count: int) -> list[Question]:
    return list(islice(questions(), count))


TOP_LEFT = ("#oo...", "##oo..", "###oo.", "####oo")
"""Four queries behind two cached tokens, whose mask is that of the first tokens."""
EVERY_KIND = ("#o...", "##!..", "#~#x.", "nan", "infinite", "zero", "constant", "right", "wrong")
"""A row of each kind and a cell of each kind."""


def picture(rows: Sequence[str], /, **more: Any) -> Picture:
    """A picture that differs from what is right in these cells. A row without weights is given by its kind."""
    keys = max(len(row) for row in rows if set(row) <= set(CELLS))
    drawn = [row if set(row) <= set(CELLS) else "" for row in rows]
    should = [[cell in "#o~" for cell in cells or "#" * keys] for cells in drawn]
    does = [[cell in "#!~x" for cell in cells] for cells in drawn]
    first = max(0, keys - len(rows))
    values = {
        "call": f"layer 0 extend, new+prefix {len(rows)}+{first}", "shown": "", "head": 1, "heads": 4, "wrong_heads": (0, 1),
        "query_sequences": (0,) * len(rows), "query_positions": tuple(range(first, first + len(rows))),
        "key_sequences": (0,) * keys, "key_indices": tuple(range(keys)), "cells": tuple(drawn),
        "expected": tuple(tuple(seen / max(1, sum(row)) for seen in row) for row in should),
        "read": tuple(tuple(seen / max(1, sum(row)) for seen in row) for row in does),
        "rows": tuple("read" if cells else row for row, cells in zip(rows, drawn, strict=True)),
    }  # fmt: skip
    return Picture(**(values | more))


@cache
def passing() -> Report:
    suites = (_mmlu("pass", right=250, lost=2, gained=2), _greedy("pass"))
    return _report("pass", "sage_attn", suites)


@cache
def regression() -> Report:
    asked = built_in(QUESTIONS)
    slips = {17, 60, 101, 143, 188, 240}
    flips = tuple(_garbled_flip(question, i) for i, question in enumerate(asked) if i >= FIRST_WAVE and i not in slips)
    counts = (
        ("cached prefix", "0", 0, 0, 0, 0), ("cached prefix", "1", 32, 31, 31, 0), ("cached prefix", "2-15", 0, 0, 0, 0),
        ("cached prefix", ">= 16", 224, 219, 0, 224), ("prompt length", "up to 127", 122, 119, 15, 106),
        ("prompt length", "128-255", 134, 131, 16, 118), ("batch size", "1", 3, 3, 0, 3), ("batch size", "2-7", 101, 98, 5, 95),
        ("batch size", ">= 8", 152, 149, 26, 126),
        *(("group", group, 64, right, 8, 56) for group, right in zip(GROUPS, (62, 63, 62, 63), strict=True)),
    )  # fmt: skip
    suite = _accuracy(
        "regression", (85.5, 80.7, 89.4), (219, 0),
        tallies=(
            Tally(role="reference", right=250, wrong=6, unparsed=0, ran_to_limit=0, total=QUESTIONS),
            Tally(role="candidate", right=31, wrong=1, unparsed=224, ran_to_limit=198, total=QUESTIONS),
        ),
        conditions=tuple(_row(*row) for row in counts), flips=flips,
        more=(measure("flip-floor", 0.0, flips=0, questions=32),),
    )  # fmt: skip
    finding = Finding(
        id="accuracy",
        title="loss of accuracy",
        severity="serious",
        where="multiple choice, >= 16 cached tokens",
        diagnosis="The candidate is right where nothing is cached and never right with a cached prefix: "
        "its causal mask does not account for the prefix.",
        evidence=(
            "cached prefix 1: reference 31/32, candidate 31/32",
            "cached prefix >= 16: reference 219/224, candidate 0/224, all unparsed",
        ),
        reproduce="assay run --candidate sage_attn_as_shipped --questions 32 --suites accuracy,layers",
        operator="query i does not see keys j > i, only where a prefix is cached",
        picture=picture(TOP_LEFT),
    )
    return _report("regression", "sage_attn_as_shipped", (suite, _greedy("regression")), findings=(finding,))


@cache
def inconclusive() -> Report:
    suite = _mmlu("inconclusive", right=250, lost=0, gained=0, cached=False)
    checks = tuple(
        check.model_copy(update={"status": "missing"}) if check.id == "cached-prefix" else check for check in _checks(met=0)
    )
    return _report("inconclusive", "sage_attn_as_shipped", (suite,), checks=checks)


@cache
def error() -> Report:
    reason = "The candidate's server died while loading (exit status 1, after 14.2 s)."
    report = _report("error", "sage_attn", ())
    finding = Finding(
        id="engine",
        title="engine",
        severity="serious",
        where="candidate server",
        diagnosis=reason,
        evidence=(
            "last line of candidate.log: RuntimeError: sageattention needs head_dim 64 or 128, the model has 80",
            "the reference server was ready after 21.3 s",
        ),
        reproduce="python -m sglang.launch_server --model-path model --device cpu --attention-backend sage_attn",
    )
    missing = tuple(check.model_copy(update={"status": "not checked"}) for check in _checks())
    candidate = report.candidate.model_copy(update={"calls": (), "startup_s": None})
    return report.model_copy(update={"findings": (finding,), "checks": missing, "candidate": candidate})


@cache
def failed_server() -> Report:
    """The page that is needed most: a server that left a log, and no verdict."""
    report, cause = error(), "ninja is not installed, and FlashInfer compiles its kernels with it"
    failure = FailureResult(
        kind="engine",
        cause="ninja",
        found=f"the candidate server: {cause}",
        do="pip install ninja",
        details="It ended its own processes during start-up.\nIts log (runs/x/candidate.log) ends:\n  FileNotFoundError: ninja",
    )
    return report.model_copy(update={"failure": failure, "findings": ()})


BY_VERDICT = {"pass": passing, "regression": regression, "inconclusive": inconclusive, "error": error}


@cache
def hostile() -> Report:
    """Every text that is not an enumeration is hostile, and two answers are 100 kB long."""
    h, base = HOSTILE, regression()
    long = "<b>" + "A" * 100_000 + "</b>" + h
    suite = base.suites[0]
    flips = tuple(
        Flip(
            item=h,
            group=h,
            direction=direction,
            prompt=long,
            expected=h,
            reference_text=text,
            candidate_text=h,
            reference_parsed=h,
            candidate_parsed=None,
            candidate_cached_tokens=None,
        )
        for direction, text in (("lost", h), ("gained", long))
    )
    divergence = DivergenceRow(
        item=h, kind="apart", position=3, gap=None, prompt=h, reference_text="same " + h, candidate_text="same x" + h,
        candidate_cached_tokens=None,
    )  # fmt: skip
    metric = suite.metrics[0].model_copy(update={"id": h, "quantity": h, "values": {h: h}})
    hostile_suite = suite.model_copy(
        update={
            "id": h, "asked": h, "why": (state(h, said=h),), "metrics": (metric,), "flips": flips, "divergences": (divergence,),
            "conditions": (_row(h, h, 4, 3, 2, 1),), "logits": (_hostile_logits(h),),
        }
    )  # fmt: skip
    call = CallSummary(
        phase=h, kernel=h, backend=h, delegated_by=h, calls=3, calls_with_cached_prefix=1, layers=2
    )  # fmt: skip
    server = ServerSummary(backend=h, engine=h, claimed_phases=(h,), calls=(call,), startup_s=1.0, launch_command=h)
    environment = Environment(
        device=h, hardware=h, python=h, packages={h: h}, git=h, model=h, model_hash=h, argument_differences={h: (h, h)}
    )
    finding = Finding(
        id=h, title=h, severity="serious", where=h, diagnosis=h, evidence=(h, h), reproduce=h, operator=h,
        picture=picture(EVERY_KIND, call=h, shown=h),
    )  # fmt: skip
    raw = Report(
        run_id=h, created=h, seconds=1.0, verdict="regression", causes=1, left_out=(h,), reference=server,
        candidate=server, environment=environment, checks=(_hostile_check(h, "missing"),),
        kernels=(_kernels("candidate", h, h, "candidate"),), envelope=_envelope(h),
        sensitivity=SensitivityResult(fault=h, parts=(FaultSeen(suite="accuracy", seen=False, numbers=state(h, said=h)),)),
        suites=(hostile_suite,), findings=(finding,), reproduce=h, treatment={h: (h, h)},
        layers=_hostile_layers(h), latency=latency(h),
    )  # fmt: skip
    # model_copy does not validate; a round through the constructor does what a real report goes through.
    return Report.model_validate(raw.model_dump(by_alias=True))


def _hostile_check(h: str, status: CheckStatus) -> Check:
    return Check(id=h, requirement=h, part=h, sides=(h, h), status=status, outcome=state(h, said=h))


def _hostile_logits(h: str) -> LogitsRow:
    return LogitsRow(
        condition=h, positions=1, sequences=1, mean_kl=1.0, median=1.0, p99=1.0, p999=1.0, max=1.0, max_at=h,
        same_top=0.5, top_k=5,
    )  # fmt: skip


def _hostile_layers(h: str) -> LayersResult:
    grid = ErrorGrid(
        id=h, where=h, columns="head", row_labels=(h, h), column_labels=(h,), values=((1.0,), ("not finite",)),
        bounds=(0.1, 0.1),
    )  # fmt: skip
    depth = DepthRow(layer=0, own=1.0, bound=0.1, out_of_bounds=True)
    return LayersResult(
        reference=h, candidate=h, phases=(h,), layers=2, heads=1, passes=1, sources=(0,),
        grids=(grid, grid.model_copy(update={"columns": "prefix"})), depth=(depth,),
        not_observed=(state(h, said=h),), pack=h, candidate_errors=(state(h, said=h),), against_truth=(truth_row(0, h, 1.0),),
    )  # fmt: skip


def truth_row(layer: int, phase: str, own: float) -> TruthRow:
    """A layer against the truth, out of bounds if its own error is above 0.1."""
    return TruthRow(
        layer=layer, phase=phase, cells=1_200, own=own, bound=0.1, gain=0.0004, gain_bound=0.001, reference_own=0.0001,
        reference_bound=0.0002, out_of_bounds=own > 0.1,
    )  # fmt: skip


def _kernels(role: Role, phase: str, name: str, of: Literal["reference", "candidate"]) -> PassKernels:
    own = KernelRow(name=name, kind="triton", launches=4, attention=True, of=of)
    other = KernelRow(name="aten::index", kind="operator", launches=1_008, attention=None, of="")
    return PassKernels(role=role, phase=phase, cached_prefix=True, kernels=(own, other))


def latency(text: str = "short", verdict: Verdict = "pass") -> LatencyResult:
    """One load: the candidate is 4 % slower, or twice as slow."""
    ratio = 2.0 if verdict == "regression" else 1.04
    finding = Finding(id=text, title=text, severity="serious", where=text, diagnosis=text, evidence=(text,), reproduce=text)
    row = LatencyRow(
        shape=text, concurrency=4, metric="ttft", reference_s=0.0123, candidate_s=0.0123 * ratio, ratio=ratio,
        low=ratio - 0.02, high=ratio + 0.03, floor=1.002, floor_low=0.987, floor_high=1.013,
        verdict=verdict, why=state(text, said=text),
    )  # fmt: skip
    load = LoadRow(
        shape=text, prompt_tokens=120, output_tokens=16, shared_tokens=96, concurrency=4, rounds=9,
        reference_output_throughput=1.0,
        candidate_output_throughput=1.0, reference_itl_p99_s=0.01, candidate_itl_p99_s=0.01, reference_cached=0.8,
        candidate_cached=0.8,
    )  # fmt: skip
    return LatencyResult(
        verdict=verdict, device="cpu", eager=True, bound=1.1,
        policy="latency_bound = 1.1 (default)" if text == "short" else text,
        note=None if text == "short" else state(text, said=text), rounds=10, warm_up_rounds=1, seconds=8.0,
        loads=(load,), rows=(row, row.model_copy(update={"metric": "itl"})),
        checks=(_hostile_check(text, "missing"),), findings=(finding,),
        reproduce=text,
    )  # fmt: skip


def many_flips(count: int = 5_000) -> Report:
    base = regression()
    flips = tuple(
        base.suites[0].flips[i % 200].model_copy(update={"item": f"mmlu-{i:05d}", "direction": "gained" if i % 10 == 0 else "lost"})
        for i in range(count)
    )
    suite = base.suites[0].model_copy(update={"flips": flips})
    return base.model_copy(update={"suites": (suite,)})


def _row(by: str, bucket: str, items: int, reference: int, candidate: int, unparsed: int) -> ConditionRow:
    quantity = by.replace(" ", "-")
    return ConditionRow(
        id=condition_id(quantity, bucket),
        by=quantity,
        title=by,
        bucket=bucket,
        lost=max(reference - candidate, 0),
        items=items,
        reference_right=reference,
        candidate_right=candidate,
        candidate_unparsed=unparsed,
    )


def _said(question: Question, letter: str) -> str:
    text, _, options = question.own.rpartition("\n\n")
    name, thing = text.rsplit("does ", 1)[1].split()[0], options.split("\n")["ABCD".index(letter)][3:]
    return f" {name} {thing} {letter} .\nAnswer: {letter}"  # as the tiny model answers


def _garbled_flip(question: Question, seed: int) -> Flip:
    rng = random.Random(seed)
    noise = " " + " ".join(rng.choice((rng.choice(NAMES), rng.choice(THINGS), ".", ".\n", "trades")) for _ in range(24))
    return _flip(question, "lost", 54 + seed % 5, (_said(question, question.answer), noise), (question.answer, None))


def _near_flip(question: Question, direction: Literal["lost", "gained"], cached: int) -> Flip:
    other = "ABCD"[("ABCD".index(question.answer) + 1) % 4]
    letters = (question.answer, other) if direction == "lost" else (other, question.answer)
    return _flip(question, direction, cached, (_said(question, letters[0]), _said(question, letters[1])), letters)


def _flip(
    question: Question, direction: Literal["lost", "gained"], cached: int, texts: tuple[str, str], parsed: tuple[str, str | None]
) -> Flip:
    return Flip(
        item=question.id, group=question.group, direction=direction, prompt=question.prompt, expected=question.answer,
        reference_text=texts[0], candidate_text=texts[1], reference_parsed=parsed[0], candidate_parsed=parsed[1],
        candidate_cached_tokens=cached,
    )  # fmt: skip


def _mmlu(verdict: Verdict, right: int, lost: int, gained: int, cached: bool = True) -> SuiteResult:
    asked = built_in(lost + gained)
    tokens = 54 if cached else 0
    candidate_right = right - lost + gained
    bucket = ">= 16" if cached else "0"
    return _accuracy(
        verdict, (0.0, -1.8, 1.8), (lost, gained),
        tallies=(
            Tally(role="reference", right=right, wrong=256 - right, unparsed=0, ran_to_limit=0, total=256),
            Tally(role="candidate", right=candidate_right, wrong=256 - candidate_right, unparsed=0, ran_to_limit=0, total=256),
        ),
        conditions=(_row("cached prefix", bucket, 256, right, candidate_right, 0),),
        flips=tuple(_near_flip(question, "lost" if i < lost else "gained", tokens) for i, question in enumerate(asked)),
    )  # fmt: skip


def _accuracy(
    verdict: Verdict, numbers: tuple[float, float, float], flips_of: tuple[int, int], more: tuple[Metric, ...] = (), **parts: Any
) -> SuiteResult:
    value, low, high = numbers
    metric = measure("loss-of-accuracy", value, low=low, high=high, bound=5.0, questions=QUESTIONS, level=0.9)
    measured = {
        "loss": value / 100, "low": low / 100, "high": high / 100, "level": 0.9, "lost": flips_of[0], "gained": flips_of[1],
        "questions": QUESTIONS, "margin": 0.05, "test": "anytime-valid",
    }  # fmt: skip
    decided = {"regression": {"id": "accuracy-lost"}, "pass": {"id": "accuracy-kept", "p_mcnemar": None}}
    undecided = {"id": "accuracy-undecided", "p_regression": 0.4, "p_mcnemar": None}
    how = dict(decided.get(verdict, undecided))
    return SuiteResult(
        id="accuracy", synthetic=True, verdict=verdict, why=(state(how.pop("id"), p=0.001, **how, **measured),),
        metrics=(metric, *more), **parts,
    )  # fmt: skip


def _greedy(verdict: Verdict) -> SuiteResult:
    broken = verdict == "regression"
    apart, divergences = (29, []) if broken else (0, [])
    low, high = (0.759, 0.975) if broken else (0.0, 0.089)
    for i, question in enumerate(built_in(apart + 2)):
        said = _said(question, question.answer)
        words = said.split(" ")
        candidate = " ".join([*words[:2], "Koven", *reversed(words[1:3]), "trades", "."])
        close = i >= apart
        divergences.append(
            DivergenceRow(
                item=f"greedy-{i:03d}",
                kind="tie" if close else "apart",
                position=2 + i % 3,
                gap=0.004 if close else 3.2 + i / 7,
                prompt=question.prompt,
                reference_text=said,
                candidate_text=candidate,
                candidate_cached_tokens=54,
            )
        )
    return SuiteResult(
        id="greedy",
        synthetic=True,
        verdict=verdict,
        why=(state("share-of-texts-apart", apart=apart, texts=32, low=low, high=high, level=0.9, margin=0.1, verdict=verdict),),
        metrics=(measure("texts-apart", 100 * apart / 32, low=100 * low, high=100 * high, bound=10.0, apart=apart, texts=32),),
        divergences=tuple(divergences),
    )


def _checks(met: int = 224) -> tuple[Check, ...]:
    questions = {"met": met, "questions": 256, "tokens": 16, "share": 0.5}
    return (
        Requirement("kernel-ran").of("extend").check("ok", state("own-kernel-called", kernel=SAGE, calls=412, layers=4)),
        Requirement("same-servers").check("ok", state("servers-agree", stored=False, arguments=212, parts=14)),
        Requirement("cached-prefix").check("ok", state("questions-cached", **questions)),
        Requirement("workload-sensitive").check("not checked", state("no-suite-for-faults")),
    )


def _calls(candidate: str) -> tuple[CallSummary, ...]:
    if candidate == NATIVE:
        return (
            CallSummary(phase="extend", kernel=NATIVE, backend=NATIVE, calls=412, calls_with_cached_prefix=388, layers=4),
            CallSummary(phase="decode", kernel=NATIVE, backend=NATIVE, calls=1020, calls_with_cached_prefix=1020, layers=4),
        )
    return (
        CallSummary(phase="extend", kernel=SAGE, backend=candidate, calls=412, calls_with_cached_prefix=388, layers=4),
        CallSummary(
            phase="decode", kernel=NATIVE, backend=NATIVE, delegated_by=candidate, calls=1020,
            calls_with_cached_prefix=1020, layers=4,
        ),
    )  # fmt: skip


def _envelope(text: str = "") -> EnvelopeResult:
    wanted = [("new-tokens", "new tokens", "17-128", 74), ("new-tokens", "new tokens", "129-512", 2)]
    short = ((1, 512),)
    compared = {
        "new-tokens": short, "new-behind-prefix": short, "prefix-tokens": ((0, 512),), "total-tokens": ((1, 513), (1024, 1024)),
        "batch": ((1, 3), (12, 12)),
    }  # fmt: skip
    return EnvelopeResult(
        policy=text or "envelope_tokens = 512 (default)",
        claimed=("extend",),
        operations=("attention", "gemm"),
        limits=EngineLimits(chunk_tokens=512, context_tokens=4096),
        compared={"extend": compared},
        served={"extend": compared},
        reached={"extend": {"new-tokens": 512, "batch": 12}},
        gaps=(state(text, said=text),) if text else (),
        rows=tuple(
            EnvelopeRow(
                phase=text or "extend", condition=text or id_, title=text or title, label=text or label, calls=calls, wanted=True
            )
            for id_, title, label, calls in wanted
        ),
    )


def _report(
    verdict: Verdict,
    candidate: str,
    suites: tuple[SuiteResult, ...],
    checks: tuple[Check, ...] | None = None,
    findings: tuple[Finding, ...] = (),
) -> Report:
    launch = "python -m sglang.launch_server --model-path evals/tiny_model/model --device cpu --attention-backend "
    return Report(
        run_id="20261120-121002-3f9a",
        left_out=tuple(name for name in WHOLE if verdict == "pass" and name not in {suite.id for suite in suites}),
        created="2026-11-20T12:12:24Z",
        seconds=142.3,
        verdict=verdict,
        reference=ServerSummary(
            backend=NATIVE, engine="SGLang 0.5.23 on cpu", claimed_phases=("extend", "decode"), calls=_calls(NATIVE),
            startup_s=21.3, launch_command=launch + NATIVE,
        ),
        candidate=ServerSummary(
            backend=candidate, engine="SGLang 0.5.23 on cpu", claimed_phases=("extend",), calls=_calls(candidate),
            startup_s=23.9, launch_command=launch + candidate,
        ),
        environment=Environment(
            device="cpu",
            hardware="2 x Intel Xeon @ 2.70GHz, 23 GiB",
            python="3.11.9",
            packages={"sglang": "0.5.23", "torch": "2.13.0+cpu", "triton": "3.5.0", "sageattention": "1.0.6"},
            git="0f3c2d1, clean",
            model="evals/tiny_model/model",
            model_hash="3f9ac1d2" * 8,
            argument_differences={},
        ),
        checks=_checks() if checks is None else checks,
        suites=suites,
        findings=findings,
        causes=0,
        kernels=(
            _kernels("reference", "extend", "aten::scaled_dot_product_attention", "reference"),
            _kernels("candidate", "extend", "_attn_fwd", "candidate"),
        ),
        envelope=_envelope(),
        sensitivity=SensitivityResult(
            fault="mask-top-left",
            parts=(
                FaultSeen(
                    suite="accuracy", seen=True, numbers=state("fault-in-answers", lost=8, gained=0, questions=8, p=0.017)
                ),
            ),
        ),
        reproduce=REPRODUCE.format(candidate=candidate),
        treatment={"backend": (NATIVE, candidate)},
    )  # fmt: skip
