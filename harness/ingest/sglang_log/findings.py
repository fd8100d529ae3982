"""What follows from a log alone. Each finding cites the lines that it follows from, and says no more than they do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.ingest.result import CitedFinding, Excerpt
from assay.harness.ingest.sglang_log.facts import Burst, Log, Metric, Server, Test, Trace, Where
from assay.harness.ingest.sglang_log.numbers import asserted
from assay.harness.stats.binomial import at_most
from assay.harness.text import listed, one_line, percent

GUESSING = {"mmlu": 0.25, "gpqa": 0.25, "hellaswag": 0.25, "mmlu_pro": 0.1}
"""Score that guessing gets: four choices (MMLU, arXiv:2009.03300; GPQA, 2311.12022; HellaSwag, 1905.07830), ten (MMLU-Pro, 2406.01574)."""
LEVEL = 0.05
"""Level of the test of a score against guessing."""
LITTLE = 0.05
"""Share of prompt tokens from the prefix cache up to which a test had almost none."""
NO_DECODE_KERNEL = {"sage_attn": "SageAttention 1.0.6 has no kernel that reads a paged KV cache"}
"""Backends that must hand decode to another one, and why."""


def findings(log: Log) -> list[CitedFinding]:
    """All findings, the serious ones first."""
    found = [
        *_below_guessing(log),
        *_below_bound(log),
        *_unparsed(log),
        *_runaways(log),
        *_prefix_untested(log),
        *_decode_not_shown(log),
        *_hidden_by_retry(log),
        *_failed_otherwise(log),
        *_notices(log),
    ]
    order = ("serious", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def cite(*places: Where | tuple[int, str]) -> tuple[Excerpt, ...]:
    """Lines, quoted: a range where there are several of a kind."""
    quoted = []
    for place in places:
        where = place if isinstance(place, Where) else Where(1, place[0], place[0], place[1])
        if where.count:
            quoted.append(Excerpt(first=where.first, last=where.last, text=one_line(where.text)))
    return tuple(quoted)


def roles(log: Log) -> tuple[str, str, Server | None]:
    """The candidate and the reference, as far as the log tells, and a server of the candidate.

    The candidate is the backend of a test that failed, or the one that most servers have; the reference is the other one.
    """
    known = [server for server in log.servers if server.arguments]
    failed = [server for server in known if server.test >= 0 and log.tests[server.test].outcome == "failed"]
    counted = sorted({one.backend for one in known}, key=lambda name: -sum(one.backend == name for one in known))
    candidate = failed[0].backend if failed else counted[0] if len(counted) > 1 else ""
    reference = next((name for name in counted if name != candidate), "")
    return candidate, reference, next((one for one in failed or known if one.backend == candidate), None)


def next_steps(log: Log, found: Iterable[CitedFinding]) -> tuple[str, ...]:
    """The commands that would prove what the log only suggests. None if nothing is suggested."""
    if all(finding.severity == "info" for finding in found):
        return ()
    candidate, reference, server = roles(log)
    if not candidate or server is None:
        return ()
    pair = f"--candidate {shlex.quote(candidate)}" + (f" --reference {shlex.quote(reference)}" if reference else "")
    model = server.arguments.get("model_path", "").strip("'\"")
    where = (
        f" --device {server.arguments['device'].strip(chr(39))}"
        if server.arguments.get("device") in ("'cuda'", "'cpu'")
        else ""
    )
    where += f" --model {shlex.quote(model)}" if model else ""
    return (f"assay check {shlex.quote(candidate)}", f"assay diff {pair}{where}", f"assay run {pair}{where}")


def questions(log: Log, metric: Metric) -> tuple[int, Where] | None:
    """How many questions a score is of: the total of a progress bar of its test that makes a whole number of right answers."""
    for bar in reversed(list(log.bars.values())):
        if bar.test == metric.test and not bar.label and bar.done == bar.total > 1:
            right = metric.value * bar.total
            if abs(right - round(right)) < 1e-3:
                return bar.total, Where(1, bar.line, bar.line, f"{bar.done}/{bar.total}")
    return None


def scores(log: Log) -> list[tuple[str, Metric]]:
    """Scores of known evaluations: ``[METRIC] mmlu_score=0.125``."""
    named = [(one.name.removesuffix("_score").removesuffix("_accuracy").lower(), one) for one in log.metrics]
    return [(name, one) for name, one in named if name != one.name.lower() and 0 <= one.value <= 1]


def _test(log: Log, index: int) -> str:
    return log.tests[index].id.rpartition("::")[2] if index >= 0 else "the log"


def _finding(
    id: str, title: str, severity: str, where: str, diagnosis: str, evidence: list[str], cites: tuple[Excerpt, ...]
) -> CitedFinding:
    return CitedFinding(
        id=id, title=title, severity=severity, where=where, diagnosis=diagnosis, evidence=tuple(evidence), reproduce="", cites=cites
    )  # fmt: skip


def _below_guessing(log: Log) -> Iterable[CitedFinding]:
    for name, metric in scores(log):
        of = questions(log, metric)
        if name not in GUESSING or of is None or metric.value >= GUESSING[name]:
            continue
        guess, right = GUESSING[name], round(metric.value * of[0])
        p = at_most(right, of[0], guess)
        sure = p < LEVEL
        groups = [
            group for group in log.groups if group.test == metric.test and group.scores.get("score") == metric.value
        ]
        evidence = [f"{right} of {of[0]} right; guessing gets {guess:g}; exact binomial test, one-sided: p = {p:.2g}"]
        evidence += [
            "by group: "
            + ", ".join(
                f"{key} {value:.3g}"
                for key, value in group.scores.items()
                if not key.endswith(":std") and key != "score"
            )
            for group in groups[:1]
        ]
        yield _finding(
            "score-below-guessing", "Score below guessing", "serious" if sure else "info", _test(log, metric.test),
            f"{name} {metric.value:g} is {'less than guessing explains' if sure else 'below guessing, within its noise'}: {right} of {of[0]} right, p = {p:.2g}.",
            evidence,
            cite((metric.line, metric.text), of[1], *((group.line, group.text) for group in groups[:1])),
        )  # fmt: skip


def _below_bound(log: Log) -> Iterable[CitedFinding]:
    for trace in log.traces:
        said = asserted(trace.exception)
        scored = [one for _, one in scores(log) if said and one.value == said[0] and one.test == trace.test]
        if said is None or not scored or not _failed(log, trace.test):
            continue
        value, than, bound = said
        of = questions(log, scored[0])
        evidence = [f"asserted: {value:g} {than} {bound:g}"]
        if of and "greater" in than and 0 < bound < 1:
            p = at_most(round(value * of[0]), of[0], bound)
            evidence.append(
                f"if the true score were {bound:g}, {round(value * of[0])} or fewer of {of[0]} would be right with p = {p:.2g}"
            )
        yield _finding(
            "score-below-bound", "Score below the bound that the test sets", "serious", _test(log, trace.test),
            f"{scored[0].name} is {value:g}; the test asks for {bound:g}.", evidence,
            cite((trace.exception_line, trace.exception), (scored[0].line, scored[0].text), _outcome(log.tests[trace.test])),
        )  # fmt: skip


def _failed(log: Log, index: int) -> bool:
    return index < 0 or log.tests[index].outcome in ("failed", "error")


def _outcome(test: Test) -> tuple[int, str]:
    return test.outcome_line, test.outcome.upper()


def _runaway_bursts(log: Log, server: Server) -> list[Burst]:
    limit = log.answer_limit[0]
    interval = server.decode_steps // server.decodes.count if server.decodes.count else 0
    return [one for one in server.bursts if limit and interval and abs(one.steps - limit) <= interval]


def _runaways(log: Log) -> Iterable[CitedFinding]:
    limit, said = log.answer_limit
    for server in log.servers:
        bursts = _runaway_bursts(log, server)
        if not bursts:
            continue
        count = sum(one.size for one in bursts)
        seconds = [one for one in log.metrics if one.test == server.test and one.name.endswith("_latency")]
        evidence = [
            f"{one.size} answers end together, {one.steps} decode steps after they began, of at most {limit}"
            for one in bursts
        ]
        evidence.append(
            f"about {server.decode_tokens / max(1, server.answered.count):,.0f} generated tokens per answered request"
        )
        evidence += [f"{one.name} = {one.value:.1f} s" for one in seconds[:1]]
        yield _finding(
            "runaway-generations", "Generations that never end", "warning", _test(log, server.test),
            f"{count} answers ran to the limit of {limit} tokens instead of ending"
            + (f", which is why the test took {seconds[0].value:.0f} s." if seconds else "."),
            evidence, cite(said, *(one.where for one in bursts), *((one.line, one.text) for one in seconds[:1])),
        )  # fmt: skip


def _unparsed(log: Log) -> Iterable[CitedFinding]:
    for name, metric in scores(log):
        of = questions(log, metric)
        if name not in GUESSING or of is None or at_most(round(metric.value * of[0]), of[0], GUESSING[name]) >= LEVEL:
            continue
        right = round(metric.value * of[0])
        endless = [one for server in log.servers if server.test == metric.test for one in _runaway_bursts(log, server)]
        ran = sum(one.size for one in endless)
        evidence = [
            f"{right} right answers are what guessing on {right / GUESSING[name]:.0f} questions gives, not on {of[0]}"
        ]
        if ran and ran < of[0]:
            evidence.append(
                f"{ran} of {of[0]} answers ran to the token limit; of the other {of[0] - ran}, at most {right} are right ({right / (of[0] - ran):.2f})"
            )
        yield _finding(
            "answers-unparsed", "Answers that could not be parsed, suspected", "warning", _test(log, metric.test),
            "A model that names any choice scores like guessing. Below it, answers are missing: cut off, or without a choice. The log does "
            "not have the answers; the evaluation's results file does.",
            evidence, cite((metric.line, metric.text), *(one.where for one in endless)),
        )  # fmt: skip


def _prefix_untested(log: Log) -> Iterable[CitedFinding]:
    shares: dict[str, list[Server]] = {}
    for server in log.servers:
        if server.test >= 0 and server.prefills.count:
            outcome = log.tests[server.test].outcome
            shares.setdefault("failed" if outcome == "error" else outcome, []).append(server)
    if log.disordered.count or not shares.get("failed") or not shares.get("passed"):
        return
    failed, passed = shares["failed"], shares["passed"]
    share, other = _share(failed), _share(passed)
    if share <= 2 * LITTLE or other > LITTLE:
        return
    batches = sum(server.prefix_batches.count for server in failed)
    yield _finding(
        "prefix-untested", "Only the failing test reuses a prefix", "warning", listed([_test(log, index) for index in sorted({s.test for s in failed})]),
        f"{percent(share)} of the prompt tokens of the failing test came from the prefix cache, and {percent(other)} of the passing tests': "
        "what passed did not test attention over a cached prefix.",
        [
            *(f"failed: {_cached(log, one)}" for one in failed),
            f"{batches} prefill batches of the failing test have {CACHED_PREFIX_TOKENS} cached tokens or more per sequence",
            *(f"passed: {_cached(log, one)}" for one in passed),
        ],
        cite(*(one.prefix_batches for one in failed), *(one.prefills for one in passed)),
    )  # fmt: skip


def _share(servers: list[Server]) -> float:
    cached = sum(one.cached_tokens for one in servers)
    return cached / max(1, cached + sum(one.new_tokens for one in servers))


def _cached(log: Log, server: Server) -> str:
    return f"{_test(log, server.test)}, server {server.number} ({server.backend}): {server.new_tokens:,} new, {server.cached_tokens:,} cached tokens"


def _decode_not_shown(log: Log) -> Iterable[CitedFinding]:
    candidate, reference, server = roles(log)
    if server is None or not any(one.decodes.count for one in log.servers if one.backend == candidate):
        return
    own = [one for one in log.servers if one.backend == candidate and one.decodes.count]
    steps = sum(one.decodes.count for one in own)
    graphs = sum(one.decode_graph for one in own)
    named = server.arguments.get("decode_attention_backend", "None").strip("'")
    evidence = [f"{graphs} of {steps} lines of decode batches ran from a CUDA graph; none names the kernel"]
    evidence += [NO_DECODE_KERNEL[candidate]] if candidate in NO_DECODE_KERNEL else []
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
    rates = [one for block in log.blocks for one in block.rows if "utput token throughput" in one[0]]
    evidence += (
        [f"the throughput of {rates[0][1]} tok/s that the log reports is of decode, so it may not be {candidate}'s"]
        if rates
        else []
    )
    yield _finding(
        "decode-not-shown", "Nothing shows that the candidate computed decode", "warning", candidate,
        f"No line says which kernel computed decode with {candidate}"
        + (f", and {candidate} must hand it to another backend." if candidate in NO_DECODE_KERNEL else "."),
        evidence,
        cite(*(one.decodes for one in own), *([graph[1]] if graph else []), *([same[1]] if same else [])),
    )  # fmt: skip


def _hidden_by_retry(log: Log) -> Iterable[CitedFinding]:
    for trace in log.traces:
        if "retry" not in trace.functions:
            continue
        test = log.tests[trace.test] if trace.test >= 0 else None
        passed = test is not None and test.outcome == "passed"
        yield _finding(
            "retry-hid-failure", "A retry hid the first failure", "warning", _test(log, trace.test),
            ("The test passed, but only after it had failed: " if passed else "The summary reports the retry, not what failed first: ")
            + one_line(trace.exception),
            [f"the traceback goes through {', '.join(name for name in trace.functions if name)}"],
            cite((trace.first, "Traceback (most recent call last):"), (trace.exception_line, trace.exception), *([_outcome(test)] if test else [])),
        )  # fmt: skip


def _failed_otherwise(log: Log) -> Iterable[CitedFinding]:
    explained = {trace.test for trace in log.traces if asserted(trace.exception)}
    for index, test in enumerate(log.tests):
        if test.outcome in ("failed", "error") and index not in explained:
            last: Trace | None = next(
                (one for one in reversed(log.traces) if one.test == index and one.exception), None
            )
            yield _finding(
                "test-failed", "A test failed", "warning", _test(log, index),
                one_line(last.exception) if last else "The log does not say why.", [],
                cite(*([(last.exception_line, last.exception)] if last else []), _outcome(test)),
            )  # fmt: skip


def _notices(log: Log) -> Iterable[CitedFinding]:
    about = {
        "kernel-not-loaded": ("A kernel was not loaded", "info", "Something was not loaded, so another implementation may have run."),
        "offline-retry": ("The hub was not reachable", "info", "Files came from the local cache: nobody checked that they are the newest."),
        "fallback": ("A fallback was announced", "warning", "Something else ran than was asked for."),
        "crash": ("A process crashed", "warning", "A process crashed: what the log says of accuracy from there on is not to be relied on."),
        "retract": ("Requests were retracted", "info", "The KV cache was full, and requests were computed again."),
    }  # fmt: skip
    for kind, (title, severity, diagnosis) in about.items():
        seen = [where for (of, _), where in log.notices.items() if of == kind]
        if seen:
            count = sum(where.count for where in seen)
            yield _finding(
                kind, title, severity, f"{count} line{'s' * (count != 1)}", diagnosis,
                [f"{where.count}×: {one_line(where.text)}" for where in seen[:5]], cite(*seen[:20]),
            )  # fmt: skip
