"""Findings from how requests were served: endless answers, prefixes, decode, retries, and notices."""

from __future__ import annotations

from collections.abc import Iterable

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.ingest.result import CitedFinding
from assay.harness.ingest.sglang_log.citing import cite, finding, outcome, runaway_bursts, test_name
from assay.harness.ingest.sglang_log.facts import Log, Server, Trace
from assay.harness.ingest.sglang_log.score_findings import missed_bounds
from assay.harness.text import counted, listed, one_line, percent
from assay.harness.verdict import Severity

_LITTLE = 0.05
"""Share of prompt tokens from the prefix cache up to which a test had almost none."""
_NO_DECODE_KERNEL = {"sage_attn": "SageAttention 1.0.6 has no kernel that reads a paged KV cache"}
"""Backends that must hand decode to another one, and why."""


def runaways(log: Log) -> Iterable[CitedFinding]:
    """Yield the answers that ran to the token limit, seen by when they ended."""
    limit, said = log.answer_limit
    for server in log.servers:
        bursts = runaway_bursts(log, server)
        if not bursts:
            continue
        count = sum(burst.size for burst in bursts)
        seconds = [metric for metric in log.metrics if metric.test == server.test and metric.name.endswith("_latency")]
        evidence = [
            f"{burst.size} answers end together, {burst.steps} decode steps after they began, of at most {limit}"
            for burst in bursts
        ]
        evidence.append(
            f"about {server.decode_tokens / max(1, server.answered.count):,.0f} generated tokens per answered request"
        )
        evidence += [f"{one.name} = {one.value:.1f} s" for one in seconds[:1]]
        yield finding(
            "runaway-generations",
            "Generations that never end",
            "warning",
            test_name(log, server.test),
            f"{count} answers ran to the limit of {limit} tokens instead of ending"
            + (f"; the evaluation took {seconds[0].value:.0f} s." if seconds else "."),
            evidence,
            cite(said, *(burst.where for burst in bursts), *((one.line, one.text) for one in seconds[:1])),
        )


def prefix_untested(log: Log) -> Iterable[CitedFinding]:
    """Report that the test that failed reused prefixes, and those that passed did not."""
    shares: dict[str, list[Server]] = {}
    for server in log.servers:
        if server.test >= 0 and server.prefills.count:
            outcome = log.tests[server.test].outcome
            shares.setdefault("failed" if outcome == "error" else outcome, []).append(server)
    if log.disordered.count or not shares.get("failed") or not shares.get("passed"):
        return
    failed, passed = shares["failed"], shares["passed"]
    share, other = _share(failed), _share(passed)
    if share <= 2 * _LITTLE or other > _LITTLE:
        return
    batches = sum(server.prefix_batches.count for server in failed)
    yield finding(
        "prefix-untested",
        "Only the failing test reuses a prefix",
        "warning",
        listed([test_name(log, index) for index in sorted({s.test for s in failed})]),
        f"{percent(share)} of the prompt tokens of the failing test came from the prefix cache, and {percent(other)} of those of "
        "the passing tests: what passed did not test attention over a cached prefix.",
        [
            *(f"failed: {_cached(log, one)}" for one in failed),
            f"{batches} prefill batches of the failing test have {CACHED_PREFIX_TOKENS} cached tokens or more per sequence",
            *(f"passed: {_cached(log, one)}" for one in passed),
        ],
        cite(*(one.prefix_batches for one in failed), *(one.prefills for one in passed)),
    )


def _share(servers: list[Server]) -> float:
    cached = sum(server.cached_tokens for server in servers)
    return cached / max(1, cached + sum(server.new_tokens for server in servers))


def _cached(log: Log, server: Server) -> str:
    who = f"{test_name(log, server.test)}, server {server.number} ({server.backend})"
    return f"{who}: {server.new_tokens:,} new, {server.cached_tokens:,} cached tokens"


def decode_not_shown(log: Log) -> Iterable[CitedFinding]:
    """Report that no line states which kernel computed decode."""
    candidate, reference, server = roles(log)
    if (
        log.disordered.count
        or server is None
        or not any(one.decodes.count for one in log.servers if one.backend == candidate)
    ):
        return
    own = [one for one in log.servers if one.backend == candidate and one.decodes.count]
    steps = sum(one.decodes.count for one in own)
    graphs = sum(one.decode_graph for one in own)
    named = server.arguments.get("decode_attention_backend", "None").strip("'")
    evidence = [f"{graphs} of {steps} lines of decode batches ran from a CUDA graph; none names the kernel"]
    evidence += [_NO_DECODE_KERNEL[candidate]] if candidate in _NO_DECODE_KERNEL else []
    evidence += [f"decode_attention_backend is {named}"]
    graph = server.facts.get("graph memory")
    twin = next(
        (
            one
            for one in log.servers
            if one.backend == reference
            and one.facts.get("graph batches", ("",))[0] == server.facts.get("graph batches", ("",))[0]
        ),
        None,
    )
    same = twin.facts.get("graph memory") if twin else None
    if graph and same and graph[0] == same[0]:
        evidence.append(f"its decode graphs take the memory that those of {reference} take, {graph[0]}")
    rates = [row for block in log.blocks for row in block.rows if "utput token throughput" in row[0]]
    evidence += (
        [f"the throughput of {rates[0][1]} tok/s that the log reports is of decode, so it may not be {candidate}'s"]
        if rates
        else []
    )
    yield finding(
        "decode-not-shown",
        "Nothing shows that the candidate computed decode",
        "warning",
        candidate,
        f"No line states which kernel computed decode with {candidate}"
        + (f", and {candidate} must hand it to another backend." if candidate in _NO_DECODE_KERNEL else "."),
        evidence,
        cite(*(one.decodes for one in own), *([graph[1]] if graph else []), *([same[1]] if same else [])),
    )


def roles(log: Log) -> tuple[str, str, Server | None]:
    """Return the candidate and the reference, as far as the log tells, and a server of the candidate.

    The candidate is the backend of a test that failed, or the one that most servers have; the reference is the other one.
    """
    known = [server for server in log.servers if server.arguments]
    failed = [server for server in known if server.test >= 0 and log.tests[server.test].outcome == "failed"]
    counted = sorted({one.backend for one in known}, key=lambda name: -sum(one.backend == name for one in known))
    candidate = failed[0].backend if failed else counted[0] if len(counted) > 1 else ""
    reference = next((name for name in counted if name != candidate), "")
    return candidate, reference, next((one for one in failed or known if one.backend == candidate), None)


def refused(log: Log) -> Iterable[CitedFinding]:
    """Yield the requests for an answer that got none."""
    for server in log.servers:
        if server.refused.count:
            total = server.refused.count + server.answered.count
            yield finding(
                "requests-failed",
                "Requests without an answer",
                "warning",
                f"server {server.number} ({server.backend})",
                f"{server.refused.count} of {total} requests were not answered: a score may count them as wrong answers.",
                [one_line(server.refused.text)],
                cite(server.refused),
            )


def hidden_by_retry(log: Log) -> Iterable[CitedFinding]:
    """Report failures that a retry wrapped, or that a later attempt covered up."""
    for trace in log.traces:
        if "retry" not in trace.functions:
            continue
        test = log.tests[trace.test] if trace.test >= 0 else None
        passed = test is not None and test.outcome == "passed"
        yield finding(
            "retry-hid-failure",
            "A retry hid the first failure",
            "warning",
            test_name(log, trace.test),
            (
                "The test passed, but only after it had failed: "
                if passed
                else "The summary reports the retry, not what failed first: "
            )
            + one_line(trace.exception),
            [f"the traceback goes through {', '.join(name for name in trace.functions if name)}"],
            cite(
                (trace.first, "Traceback (most recent call last):"),
                (trace.exception_line, trace.exception),
                *([outcome(test)] if test else []),
            ),
        )


def failed_otherwise(log: Log) -> Iterable[CitedFinding]:
    """Yield the tests that failed for another reason than a score."""
    explained = {trace.test for trace, _, _ in missed_bounds(log)}
    for index, test in enumerate(log.tests):
        if test.outcome in ("failed", "error") and index not in explained:
            last: Trace | None = next(
                (one for one in reversed(log.traces) if one.test == index and one.exception), None
            )
            yield finding(
                "test-failed",
                "A test failed",
                "warning",
                test_name(log, index),
                one_line(last.exception) if last else "The log does not state why.",
                [],
                cite(*([(last.exception_line, last.exception)] if last else []), outcome(test)),
            )


def not_finite(log: Log) -> Iterable[CitedFinding]:
    """Yield the kernels that returned NaN although none was given to them."""
    for name, where in log.nan_from.items():
        yield finding(
            "kernel-returned-nan",
            "A kernel returned NaN",
            "warning",
            one_line(name),
            f"{one_line(name)} returned NaN in {where.count} of its tensors, and was given none.",
            ["this text has no tensors: SGLANG_KERNEL_API_LOGLEVEL=10 dumps them, and assay pack import replays them"],
            cite(where),
        )


def notices(log: Log) -> Iterable[CitedFinding]:
    """Yield the lines that may matter by themselves."""
    about: dict[str, tuple[str, Severity, str]] = {
        "kernel-not-loaded": (
            "A kernel was not loaded",
            "info",
            "Something was not loaded, so another implementation may have run.",
        ),
        "offline-retry": (
            "The hub was not reachable",
            "info",
            "Files came from the local cache: they were not checked for newer versions.",
        ),
        "fallback": ("A fallback was announced", "warning", "Something else ran than was asked for."),
        "crash": (
            "A process crashed",
            "warning",
            "A process crashed: do not rely on what the log states about accuracy from there on.",
        ),
        "retract": ("Requests were retracted", "info", "The KV cache was full, and requests were computed again."),
    }
    for kind, (title, severity, diagnosis) in about.items():
        seen = [where for (of, _), where in log.notices.items() if of == kind]
        if seen:
            count = sum(where.count for where in seen)
            yield finding(
                kind,
                title,
                severity,
                counted(count, "line"),
                diagnosis,
                [f"{where.count}×: {one_line(where.text)}" for where in seen[:5]],
                cite(*seen[:20]),
            )
