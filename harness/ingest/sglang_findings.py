"""Findings from a log alone. Each cites its supporting lines, and claims no more than they say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from assay.harness.attention.published import published
from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.evidence.accuracy_lines import weight_of
from assay.harness.ingest.guessing import GUESSING, LEVEL, TaskScore, at_most, below_guessing
from assay.harness.ingest.result import CitedFinding, CitedLines, Excerpt
from assay.harness.ingest.result_set import MOST_UNPARSED
from assay.harness.ingest.sglang_facts import Log, LogMetric, Server
from assay.harness.ingest.sglang_patterns import ENDED_BY_ANOTHER, NUMBER
from assay.harness.text import counted, listed, one_line, percent
from assay.harness.tracebacks import HEADER, Traceback
from assay.harness.verdict import Severity

_SAFE = re.compile(r"\w[\w./:@+-]*")
# Largest share of prompt tokens from the prefix cache that counts as almost none.
_LITTLE = 0.05
# Backends that must leave decode to another backend, and the reason.
_NO_DECODE_KERNEL = {"sage_attn": "SageAttention 1.0.6 has no kernel that reads a paged KV cache"}
# Findings by id, worst first, except those of `guessing.below_guessing`.
_TITLES: dict[str, tuple[Severity, str]] = {
    "score-below-bound": ("serious", "Score below the bound that the test sets"),
    "crash": ("warning", "A process crashed"),
    "test-failed": ("warning", "A test failed"),
    "answers-invalid": ("warning", "Answers that could not be parsed"),
    "answers-unparsed": ("warning", "Answers that could not be parsed, suspected"),
    "accuracy-warned": ("warning", "The engine warns about its accuracy"),
    "requests-failed": ("warning", "Requests without an answer"),
    "runaway-generations": ("warning", "Generations that never end"),
    "prefix-untested": ("warning", "Only the failing test reuses a prefix"),
    "decode-not-shown": ("warning", "Nothing shows that the candidate computed decode"),
    "retry-hid-failure": ("warning", "A retry hid the first failure"),
    "fallback": ("warning", "A fallback was announced"),
    "error-logged": ("warning", "An error was logged"),
    "kernel-not-loaded": ("info", "A kernel was not loaded"),
    "offline-retry": ("info", "The hub was not reachable"),
    "retract": ("info", "Requests were retracted"),
}
_VALUE = rf"(?P<value>(?:np\.\w+\()?{NUMBER}\)?)"
# AssertionError: np.float64(0.125) not greater than or equal to 0.6
# AssertionError: assert 0.125 >= 0.6
_ASSERTED = (
    re.compile(rf"(?<![\d.]){_VALUE} not greater than(?: or equal to)? (?P<bound>{NUMBER})"),
    re.compile(rf"assert {_VALUE} >=? (?P<bound>{NUMBER})"),
)
# Conclusion from a line that may matter by itself, by its kind.
_NOTICES = {
    "accuracy-warned": "Compare it with a run without this setting.",
    "kernel-not-loaded": "Something was not loaded, so another implementation may have run.",
    "offline-retry": "Files came from the local cache: they were not checked for newer versions.",
    "fallback": "Something other than the requested implementation ran.",
    "crash": "Do not rely on the log's statements about accuracy after this line.",
    "retract": "The KV cache was full, so requests were computed again.",
}


def findings(log: Log) -> list[CitedFinding]:
    """List all findings, worst first."""
    rules = (
        _below_guessing, _below_bound, _invalid, _unparsed, _runaways, _prefix_untested, _decode_not_shown, _refused,
        _hidden_by_retry, _failed_otherwise, _notices, _errors,
    )  # fmt: skip
    return sorted((made for rule in rules for made in rule(log)), key=badness)


def badness(finding: CitedFinding) -> tuple[int, int]:
    """Return a finding's rank, lowest for the worst: by severity, then in the order of `_TITLES`."""
    severities, ids = ("serious", "warning", "info"), ("score-below-guessing", *_TITLES)
    return severities.index(finding.severity), ids.index(finding.id) if finding.id in ids else len(ids)


def next_steps(log: Log, cited: Iterable[CitedFinding]) -> tuple[str, ...]:
    """List commands that would prove the log's suspicions, or nothing if it raises none.

    Names come from the log, so they are used only if they need no shell quoting. If assay publishes a kernel that calls a package
    the way the backend does (``sage_attn_as_shipped``), that kernel stands in for the backend; its ``sage_attn`` is corrected.
    """
    candidate, reference, server = _roles(log)
    if server is None or not _SAFE.fullmatch(candidate) or all(item.severity == "info" for item in cited):
        return ()
    stand_in = f"{candidate}_as_shipped"
    flags = [f"--candidate {stand_in if stand_in in published() else candidate}"]
    device, model = (server.arguments.get(name, "").strip("'\"") for name in ("device", "model_path"))
    named = {"reference": reference, "device": device, "model": model}
    flags += [f"--{flag} {value}" for flag, value in named.items() if _SAFE.fullmatch(value)]
    kernel = f"assay check {stand_in}" if stand_in in published() else f"assay check sglang:{candidate}"
    return (kernel, f"assay run --suites layers,logits {' '.join(flags)}", f"assay run {' '.join(flags)}")


def _finding(id: str, where: str, diagnosis: str, evidence: Sequence[str], cites: Iterable[CitedLines]) -> CitedFinding:
    """Make a finding without its own command, since the document lists the next steps."""
    severity, title = _TITLES[id]
    return CitedFinding(
        id=id, title=title, severity=severity, where=where, diagnosis=diagnosis, evidence=tuple(evidence), reproduce="",
        cites=cite(*cites),
    )  # fmt: skip


def cite(*places: CitedLines) -> tuple[Excerpt, ...]:
    """Quote lines, as a range if there are several of a kind."""
    return tuple(lines.excerpt for lines in places if lines.count)


def _outcome(log: Log, index: int) -> list[CitedLines]:
    """Return the line with a test's outcome, or nothing outside all tests."""
    return [
        CitedLines.of(test.outcome_line, test.outcome.upper()) for test in log.tests[index : index + 1] if index >= 0
    ]


def _raised(trace: Traceback) -> CitedLines:
    return CitedLines.of(trace.exception_line, trace.exception)


def _scores(log: Log) -> Iterator[tuple[TaskScore, LogMetric]]:
    """Yield the scores of known evaluations: ``[METRIC] mmlu_score=0.125``.

    The number of questions is the total of a progress bar in the test for which score x total is an integer.
    """
    for metric in log.metrics:
        name = metric.name.removesuffix("_score").removesuffix("_accuracy").lower()
        if name == metric.name.lower() or not 0 <= metric.value <= 1:
            continue
        questions, bar = 0, CitedLines()
        for (test, label, total), (done, line) in log.bars.items():
            right = metric.value * total
            if test == metric.test and not label and done == total > 1 and abs(right - round(right)) < 1e-3:
                questions, bar = total, CitedLines.of(line, f"{done}/{total}")
        where, cites = log.name_of(metric.test), cite(metric.at, bar)
        yield TaskScore(name, "", metric.value, questions, where, cites, run=str(metric.at.first)), metric


def _below_guessing(log: Log) -> Iterator[CitedFinding]:
    """Yield a score that is below guessing, with its exact p-value. Scores without a number of questions are skipped."""
    scores = [*log.printed.scores()]
    for score, metric in _scores(log):
        same = (metric.test, metric.value)
        groups = [(scores, at) for scores, at, test in log.groups if (test, scores.get("score")) == same][:1]
        named = [
            [f"{key} {value:.3g}" for key, value in scores.items() if not key.endswith(":std") and key != "score"]
            for scores, _ in groups
        ]
        evidence = tuple(f"by group: {', '.join(each)}" for each in named)
        cites = (*score.cites, *cite(*(at for _, at in groups)))
        scores += [score._replace(cites=cites, evidence=evidence)] if score.questions else []
    yield from below_guessing(scores)


def _missed_bounds(log: Log) -> Iterator[tuple[Traceback, TaskScore, LogMetric, float]]:
    """Yield the assertions that failed because of a score in the log: the traceback, the score, its metric, and the bound."""
    for trace, test in log.traces:
        said = next(filter(None, (pattern.search(trace.exception) for pattern in _ASSERTED)), None)
        # A traceback outside all tests counts as a failure, since nothing shows that it was not.
        if said and (test < 0 or log.failed(test)):
            value, bound = float(re.sub(r"np\.\w+\(|\)", "", said["value"])), float(said["bound"])
            scored = ((s, metric) for s, metric in _scores(log) if s.score == value <= bound and metric.test == test)
            yield from ((trace, *each, bound) for each in islice(scored, 1))


def _below_bound(log: Log) -> Iterator[CitedFinding]:
    """Yield a test that failed because of a score."""
    for trace, score, metric, bound in _missed_bounds(log):
        count, right = score.questions, score.right
        evidence = [f"the assertion that failed: {one_line(trace.exception)}"]
        if count and 0 < bound < 1:
            said = f"{right} or fewer of {count} would be right with p = {at_most(right, count, bound):.2g}"
            evidence.append(f"if the true score were {bound:g}, {said}")
        says = f"{metric.name} is {metric.value:g}; the test asks for {bound:g}."
        cites = (_raised(trace), metric.at, *_outcome(log, metric.test))
        yield _finding("score-below-bound", score.where, says, evidence, cites)


def _invalid(log: Log) -> Iterator[CitedFinding]:
    """Yield the share of answers that the evaluation itself calls invalid. Its accuracy counts them as wrong."""
    accuracy: dict[int, LogMetric] = {}
    for metric in log.metrics:
        if metric.name == "Accuracy":
            accuracy[metric.test] = metric
        if metric.name == "Invalid" and 0 < metric.value <= 1:
            scores = [accuracy[metric.test]] if metric.test in accuracy else []
            counts = "".join(f", and Accuracy {score.value:g} counts them as wrong" for score in scores)
            says = f"{percent(metric.value)} of the answers are invalid{counts}."
            cites = (metric.at, *(score.at for score in scores))
            made = _finding("answers-invalid", log.name_of(metric.test), says, [], cites)
            yield made if metric.value > MOST_UNPARSED else made.model_copy(update={"severity": "info"})


def _unparsed(log: Log) -> Iterator[CitedFinding]:
    """Yield suspected missing answers if a score is below guessing."""
    says = (
        "A model that names any choice at all scores like guessing. Below that, answers are missing: cut off, or without a choice. "
        "The answers are not in the log, but in the evaluation's results file."
    )
    for score, metric in _scores(log):
        count, right, guess = score.questions, score.right, GUESSING.get(score.task, 0.0)
        if not guess or not count or at_most(right, count, guess) >= LEVEL:
            continue
        endless = [burst for server in log.servers if server.test == metric.test for burst in _runaway(log, server)]
        ran = sum(answers.count for answers, _ in endless)
        evidence = [f"guessing on {right / guess:.0f} questions, not {count}, would give {right} right answers"]
        if 0 < ran < count:
            rest = f"of the other {count - ran}, at most {right} are right ({right / (count - ran):.2f})"
            evidence.append(f"{ran} of {count} ran to the token limit; {rest}")
        cites = (metric.at, *(answers for answers, _ in endless))
        yield _finding("answers-unparsed", score.where, says, evidence, cites)


def _runaway(log: Log, server: Server) -> list[tuple[CitedLines, int]]:
    """Find answers that ended together after as many steps as an answer may have tokens."""
    limit = log.answer_limit[0]
    interval = server.decode_steps // server.decodes.count if server.decodes.count else 0
    # A log of several processes shows nothing: the batches in between may belong to any of them.
    if log.disordered.count or not limit or not interval:
        return []
    return [burst for burst in server.bursts if abs(burst[1] - limit) <= interval]


def _runaways(log: Log) -> Iterator[CitedFinding]:
    """Yield the answers that ran to the token limit, judging by when they ended."""
    limit, said = log.answer_limit
    for server in log.servers:
        bursts = _runaway(log, server)
        if not bursts:
            continue
        timed = (metric for metric in log.metrics if metric.test == server.test)
        latencies = [metric for metric in timed if metric.name.endswith("_latency")][:1]
        together = f"answers end together, {{}} decode steps after they began (limit: {limit})"
        evidence = [
            *(f"{answers.count} {together.format(steps)}" for answers, steps in bursts),
            f"about {server.decode_tokens / max(1, server.answered.count):,.0f} generated tokens per answered request",
            *(f"{metric.name} = {metric.value:.1f} s" for metric in latencies),
        ]
        took = f"; the evaluation took {latencies[0].value:.0f} s." if latencies else "."
        says = f"{sum(answers.count for answers, _ in bursts)} answers ran to the limit of {limit} tokens instead of ending{took}"
        cites = (said, *(answers for answers, _ in bursts), *(metric.at for metric in latencies))
        yield _finding("runaway-generations", log.name_of(server.test), says, evidence, cites)


def _prefix_untested(log: Log) -> Iterator[CitedFinding]:
    """Report that only the failing test reused prefixes."""
    tested = [server for server in log.servers if server.test >= 0 and server.prefills.count]
    failed = [server for server in tested if log.failed(server.test)]
    passed = [server for server in tested if log.tests[server.test].outcome == "passed"]
    if log.disordered.count or not failed or not passed:
        return
    share, other = _cached_share(failed), _cached_share(passed)
    if share <= 2 * _LITTLE or other > _LITTLE:
        return
    batches = sum(server.prefix_batches.count for server in failed)
    evidence = [
        *(f"failed: {_cached(log, server)}" for server in failed),
        f"{batches} prefill batches of the failing test have {CACHED_PREFIX_TOKENS} cached tokens or more per sequence",
        *(f"passed: {_cached(log, server)}" for server in passed),
    ]
    says = (
        f"{percent(share)} of the failing test's prompt tokens came from the prefix cache, but only {percent(other)} of the "
        "passing tests' tokens: the passing tests did not exercise attention over a cached prefix."
    )
    where = listed([log.name_of(index) for index in sorted({server.test for server in failed})])
    cites = [*(server.prefix_batches for server in failed), *(server.prefills for server in passed)]
    yield _finding("prefix-untested", where, says, evidence, cites)


def _cached_share(servers: list[Server]) -> float:
    cached = sum(server.cached_tokens for server in servers)
    return cached / max(1, cached + sum(server.new_tokens for server in servers))


def _cached(log: Log, server: Server) -> str:
    who = f"{log.name_of(server.test)}, server {server.number} ({server.backend})"
    return f"{who}: {server.new_tokens:,} new, {server.cached_tokens:,} cached tokens"


def _decode_not_shown(log: Log) -> Iterator[CitedFinding]:
    """Report that the log does not state which kernel computed decode."""
    candidate, reference, server = _roles(log)
    own = [server for server in log.servers if server.backend == candidate and server.decodes.count]
    if log.disordered.count or server is None or not own:
        return
    steps, graphs = sum(server.decodes.count for server in own), sum(server.decode_graph for server in own)
    evidence = [f"{graphs} of {steps} lines of decode batches ran from a CUDA graph; none names the kernel"]
    evidence += [_NO_DECODE_KERNEL[candidate]] if candidate in _NO_DECODE_KERNEL else []
    handed = server.arguments.get("decode_attention_backend", "None").strip("'")
    evidence.append(f"decode_attention_backend is {handed}")
    # If the reference's graphs for the same batches take equal memory, the kernel is probably the same.
    memory, of_own = server.graph_memory
    twins = [twin for twin in log.servers if (twin.backend, twin.graph_batches) == (reference, server.graph_batches)]
    same = (
        next((twin.graph_memory[1] for twin in twins[:1] if memory == twin.graph_memory[0]), None) if memory else None
    )
    if same:
        evidence.append(f"its decode graphs take as much memory as those of {reference}: {memory}")
    rates = [metric for metric in log.metrics if "utput token throughput" in metric.name][:1]
    said = f"that the log reports is for decode, so it may not be {candidate}'s"
    evidence += [f"the throughput of {rate.value:g} tok/s {said}" for rate in rates]
    hands = f", which {candidate} must leave to another backend." if candidate in _NO_DECODE_KERNEL else "."
    says = f"The log does not state which kernel computed decode with {candidate}{hands}"
    cites = [*(server.decodes for server in own), of_own, *([same] if same else [])]
    yield _finding("decode-not-shown", candidate, says, evidence, cites)


def _roles(log: Log) -> tuple[str, str, Server | None]:
    """Return the candidate and the reference, as far as the log shows them, and a server of the candidate."""
    # The candidate is the backend of a failed test, or else the most frequent backend. The reference is the other one.
    known = [server for server in log.servers if server.arguments]
    failed = [server for server in known if server.test >= 0 and log.tests[server.test].outcome == "failed"]
    often = Counter(server.backend for server in known)
    names = sorted(often, key=lambda name: (-often[name], name))
    candidate = failed[0].backend if failed else names[0] if len(names) > 1 else ""
    reference = next((name for name in names if name != candidate), "")
    return candidate, reference, next((server for server in failed or known if server.backend == candidate), None)


def _refused(log: Log) -> Iterator[CitedFinding]:
    """Yield the requests that were not answered."""
    for server in log.servers:
        if count := server.refused.count:
            total, where = count + server.answered.count, f"server {server.number} ({server.backend})"
            says = f"{count} of {total} requests were not answered, and a score may count them as wrong."
            yield _finding("requests-failed", where, says, [one_line(server.refused.text)], [server.refused])


def _hidden_by_retry(log: Log) -> Iterator[CitedFinding]:
    """Yield failures that a retry wrapped or that a later attempt hid."""
    for trace, test in log.traces:
        functions = [frame.name for frame in trace.frames if frame.name]
        if "retry" not in functions:
            continue
        passed = test >= 0 and log.tests[test].outcome == "passed"
        hid = "The test passed, but only after it had failed"
        hid = hid if passed else "The summary reports the retry, not the first failure"
        evidence = [f"the traceback goes through {', '.join(functions)}"]
        cites = (CitedLines.of(trace.first, HEADER), _raised(trace), *_outcome(log, test))
        says = f"{hid}: {one_line(trace.exception)}"
        yield _finding("retry-hid-failure", log.name_of(test), says, evidence, cites)


def _failed_otherwise(log: Log) -> Iterator[CitedFinding]:
    """Yield the tests that failed for a reason other than a score."""
    explained = {metric.test for _, _, metric, _ in _missed_bounds(log)}
    failed = [index for index in range(len(log.tests)) if log.failed(index)]
    for index in failed:
        if index not in explained:
            last = [trace for trace, of in log.traces if of == index and trace.exception][-1:]
            says = one_line(last[0].exception) if last else "The log does not state the reason."
            yield _finding("test-failed", log.name_of(index), says, [], [*map(_raised, last), *_outcome(log, index)])
    counts, line = log.summary
    if re.search(r"\b(?:failed|errors?)\b", counts) and not failed:
        says = f"pytest counts {counts}, but the log does not name a failure."
        yield _finding("test-failed", "the log", says, [], [CitedLines.of(line, counts)])


def _notices(log: Log) -> Iterator[CitedFinding]:
    """Yield the lines that may matter by themselves."""
    for kind in _NOTICES:
        seen = [where for (of, _), where in log.notices.items() if of == kind]
        seen = sorted(seen, key=lambda where: weight_of(where.text) or 0) if kind == "accuracy-warned" else seen
        if seen:
            says = _crashed_by(log, seen) if kind == "crash" else seen[0].text if kind == "accuracy-warned" else ""
            yield _noticed(kind, seen, f"{one_line(says, 300).rstrip('.')}." if says else "")


def _noticed(kind: str, seen: Sequence[CitedLines], says: str) -> CitedFinding:
    evidence = [f"{where.count}×: {one_line(where.text)}" for where in seen[:5]]
    lines = counted(sum(where.count for where in seen), "line")
    return _finding(kind, lines, f"{says} {_NOTICES.get(kind, '')}".strip(), evidence, seen[:20])


def _crashed_by(log: Log, seen: Sequence[CitedLines]) -> str:
    """Return the cause of a process's end: an exception not caused by another process, or else the way it ended."""
    begun = {where.first + more for where in seen for more in (0, 1)} | {where.first for where in seen}
    raised = [trace.exception for trace, _ in log.traces if trace.exception and trace.first in begun]
    causes = [exception for exception in raised if not ENDED_BY_ANOTHER.match(exception)]
    died = [where.text for where in seen if " died " in where.text]
    return next(iter((*causes, *died, *raised)), seen[0].text)


def _errors(log: Log) -> Iterator[CitedFinding]:
    """Yield errors and exceptions outside tests if no line says that a process crashed."""
    if any(kind == "crash" for kind, _ in log.notices) or log.tests:
        return
    raised = [_raised(trace) for trace, _ in log.traces if trace.exception]
    seen = [*reversed(raised), *(where for (kind, _), where in log.notices.items() if kind == "error")]
    if seen:
        yield _noticed("error-logged", seen, f"{one_line(seen[0].text, 300).rstrip('.')}.")
