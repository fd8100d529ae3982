"""Patterns for the lines of a log that bear a fact, by kind. Each follows an example line, unless it is nearly the line itself.

Sources: logs of vLLM 0.6 to 0.27 (how an engine ends, and the prefix of each line); the code and logs of SGLang 0.4.6 to 0.5.23
(``sglang/srt``, ``sglang/test``, ``sglang/bench_*``), uvicorn 0.51, pytest 9.0 and huggingface_hub 1.x. A pattern describes a
program's output on any machine, never a single file. A line that begins like none of them bears no fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

NUMBER = r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_VALUE = rf"(?:np\.\w+\()?(?:{NUMBER}|nan)\)?"
_GRAPH = r"Capture (?:\w+ )*(?:cuda|cpu|CUDA|CPU) graph"
# Further figures of a batch: ", token usage: 0.00, #running-req: 0, #queue-req: 0, "
_TAIL = r"(?:, [#\w][\w #()/.-]*: [^\s,:\[\]]+)*(?:, ?)?"


class Forms:
    """Lines that bear a fact, by kind: a pattern of how the line begins, without groups, and one of the rest.

    A line that begins like one of a kind but does not have its form was cut off, damaged, or written by another version.
    """

    def __init__(self, kinds: Mapping[str, tuple[str, str]]) -> None:
        self._begins = re.compile("|".join(f"(?P<{kind}>{begins})" for kind, (begins, _) in kinds.items()))
        self._forms = {kind: re.compile(f"(?:{begins}){rest}", re.DOTALL) for kind, (begins, rest) in kinds.items()}

    def find(self, text: str) -> tuple[str, re.Match[str] | None]:
        """Return the kind that a text begins like, or "", and the match of its whole form, or None."""
        begins = self._begins.match(text)
        kind = (begins.lastgroup or "") if begins else ""
        return kind, self._forms[kind].fullmatch(text) if kind else None


LOGGED = Forms({
    # "Prefill batch." and "Prefill batch [12]" are older forms.
    # Prefill batch, #new-seq: 1, #new-token: 41, #cached-token: 77, token usage: 0.00, #running-req: 0, #queue-req: 0,
    "prefill": ("Prefill batch", rf"(?: \[\d+\])?[,.] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)(?=,){_TAIL}"),
    # Decode batch, #running-req: 18, #token: 3456, token usage: 0.03, cuda graph: True, gen throughput (token/s): 96.49,
    "decode": ("Decode batch", rf"(?: \[\d+\])?[,.] #running-req: (\d+)(?=,){_TAIL}"),
    # INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK
    "request": (r'INFO: +[\w.:-]+ - "POST /(?:v1/chat/completions|v1/completions|generate)[? ]', r'.*HTTP/[\d.]+" (\d{3})(?: .*)?'),
    "graph_sizes": (rf"{_GRAPH} (?:bs|num tokens) ", r"(\[[\d, ]*\])"),
    # Capture cuda graph end. Time elapsed: 2.39 s. mem usage=0.14 GB. avail mem=4.90 GB.
    "graph_end": (rf"{_GRAPH} end\.", r"(?:.* mem usage=([\d.]+ GB))?.*"),
})  # fmt: skip
"""Lines that an engine logs, after their time or their process."""
PRINTED = Forms({
    # [METRIC] mmlu_score=0.125 labels={"model": "meta-llama/Llama-3.1-8B-Instruct", "eval": "mmlu"}
    "metric": (r"\[METRIC\] ", rf"(?P<name>[\w./-]+)=(?P<value>{NUMBER}|nan|inf)(?: labels=\{{.*\}})?"),
    # output_throughput=97.5
    "assigned": (rf"(?=[a-z]\w*={NUMBER}$)", r"(?P<name>\w+)=(?P<value>.*)"),
    # Total latency: 64.467 s    or    Output token throughput (tok/s):         96.49
    "stated": (
        r"(?=(?:Total latency|Score|Accuracy|Invalid|Latency|Output throughput|acc_length|speed"
        r"|[A-Z]\w*(?: \w+){0,3} throughput \([\w/]+\)): )",
        rf"(?P<name>[\w /()]+): +(?P<value>{NUMBER})(?: ?(?:s|token/s|%))? *",
    ),
    # {'other': np.float64(0.1875), 'other:std': np.float64(0.39), 'score': np.float64(0.125)}
    "scores": (r"\{'[^']{1,80}': (?=np\.|nan|[-.\d])", rf"{_VALUE}(?:, '[^']{{1,80}}': {_VALUE})*\}}"),
    # ChatCompletionSampler initialized with self.system_message=None self.temperature=0.0 self.max_tokens=2048 ...
    "sampler": (r"ChatCompletionSampler initialized with self\.system_message=", ".*"),
    # FAILED                                                                    [ 75%]
    "outcome": (
        r"(?=(?:PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS|RERUN)(?: \(| +\[|$))",
        r"(?P<outcome>\w+)(?: \(.*\))?(?: +\[ *\d+%\])?",
    ),
    # test_mmlu (__main__.TestX) ... FAIL
    "unittest": (
        r"(?=\w+ \([\w.]+\) \.\.\. )",
        r"(?P<id>\w+ \([\w.]+\)) \.\.\. (?P<outcome>ok|FAIL|ERROR|skipped .*|expected failure)?",
    ),
    # =========================== short test summary info ============================
    "section": (
        r"={3,} (?=(?:test session starts|warnings summary|(?:short|rerun) test summary info|FAILURES|ERRORS|PASSES|slowest .*)"
        r" ={3,}$)",
        r"(.*?) =+",
    ),
    # ==================== 1 failed, 3 passed, 1 warning in 319.15s (0:05:19) ====================
    "counts": (
        r"(?:={3,} )?(?=\d+ (?:failed|passed|skipped|deselected|xfailed|xpassed|warnings?|errors?|rerun)\b|no tests ran in )",
        r"((?:\d+ \w+(?:, )?)* in [\d.]+s(?: \([\d:]+\))?|no tests ran in [\d.]+s)(?: ={3,})?",
    ),
})  # fmt: skip
"""Lines that tests, evaluations and benchmarks print."""
_FAILURES = Forms({
    # __________________________________ test_mmlu ___________________________________
    "failed": (r"_{3,} (?=[^_ ])", r"(?:ERROR at (?:setup|teardown) of )?([^_ ].*?) _{3,}"),
    # E       assert 0.125 >= 0.6
    "raised": (r"E {3,}(?=\S)", "(.*)"),
    # test_eval.py:3: AssertionError
    "place": (r"(?=[\w./<>-]+:\d+: [A-Za-z_]\w*$)", r"(?P<file>.*):(?P<line>\d+): (?P<kind>\w+)"),
})  # fmt: skip
_SUMMARY = Forms({
    # FAILED test_eval.py::test_mmlu - assert 0.125 >= 0.6
    "summary": (
        r"(?=(?:FAILED|ERROR) (?:\S+::|\S+\.py))",
        r"(?P<outcome>\w+) (?P<id>\S+::\S+|\S+\.py(?::\d+)?)(?: - (?P<why>.*)|:? .*)?",
    ),
})  # fmt: skip
SECTIONS = {
    "FAILURES": _FAILURES, "ERRORS": _FAILURES, "PASSES": _FAILURES,
    "short test summary info": _SUMMARY, "rerun test summary info": _SUMMARY,
}  # fmt: skip
"""Lines of a section of pytest's output, by the section's title."""
_OFFLINE = r"(?:WARNING _http\.py:\d+: )?(?:Retrying in [\d.]+s \[Retry |.*thrown while requesting (?:HEAD|GET) )"
# Lines that quote a request, or that have a word of a fallback for another reason.
_NO_FALLBACK = (
    r"(?:Receive|Finish): obj=|Using fallback token IDs for|Ignore import error|.*(?:chat template|\bdeprecated\b)"
)
_NOTED_LOGGED = (
    ("kernel-not-loaded", r"(?:Failed to|Could not|Unable to) (?:load|import|initialize|compile) "),
    ("offline-retry", _OFFLINE),
    # -15 is the signal with which a server is ended.
    ("crash", r"Subprocess \w+ \(pid=\d+\) crashed with exit code (?!-15\.)|Received sigquit from a child process\."),
    ("crash", r"(?:\w+ hit an exception|\w+ watchdog timeout|Health check failed|CUDA out of memory|Out of memory)\b"),
    # vLLM: EngineCore encountered a fatal error.
    ("crash", r"(?:CPU )?EngineCore (?:failed to start|encountered a fatal error)\.|WorkerProc failed to start\."),
    ("crash", r"(?:Engine core|Worker) proc \S+ died unexpectedly, |(?:AsyncLLM output_handler|Engine background task) failed\b"),
    ("retract", r"(?:KV cache pool is full|Decode out of memory happened)\. Retract requests\. "),
    ("fallback", rf"(?i)(?!{_NO_FALLBACK}).*\b(?:fall(?:s|ing)? ?back|fell back|roll(?:s|ing)? back|fallback)\b"),
)  # fmt: skip
_NOTED_PRINTED = (
    ("crash", r"Fatal Python error: |(?:Killed|Aborted|Segmentation fault)(?: +\(core dumped\))?$"),
    ("offline-retry", _OFFLINE),
)
_LOGGED_KINDS, _PRINTED_KINDS = (
    tuple((kind, re.compile(pattern, re.DOTALL)) for kind, pattern in rows) for rows in (_NOTED_LOGGED, _NOTED_PRINTED)
)


def kind_of(text: str, *, logged: bool) -> str:
    """Return the kind of a line that matters by itself, or "". An engine logged the line, or something printed it."""
    kinds = _LOGGED_KINDS if logged else _PRINTED_KINDS
    return next((kind for kind, pattern in kinds if pattern.match(text)), "")


_PROCESS = r"\((?:APIServer|EngineCore|Worker|VllmWorker)[^()]{0,60}\)(?: |$)"
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) "
_DATE = r"\d\d-\d\d \d\d:\d\d(?::\d\d)? "
_PLACE = r"(?:\[[\w./ -]+:\d+\]|[\w.]+:\d+\])(?: |$)"
VLLM_SIGN = rf"(?:{_PROCESS}|{_LEVEL}{_DATE}{_PLACE})"
"""The prefix of a vLLM line, after any prefix from a container: its process, or its level, date and place."""
VLLM = re.compile(
    rf".{{0,120}}?(?={_PROCESS}|{_LEVEL}(?:{_DATE})?{_PLACE})(?:{_PROCESS})?(?P<logged>{_LEVEL}(?:{_DATE})?{_PLACE})?"
)
"""Everything before the message of a vLLM line. The group "logged" is empty if the line was printed."""
ENDED_BY_ANOTHER = re.compile(
    r"(?:\S*\.)?(?:Async)?EngineDeadError\b"
    r"|RuntimeError: (?:Engine core initialization failed|Worker failed with error|cancelled|Executor failed)"
)
"""Exceptions of a vLLM process that ends because of another one."""
# Characters of a line that are searched for progress bars.
_LONGEST_BARS = 20_000
# Several writers may share a line: progress bars that end in a carriage return or in nothing, test names, stream labels.
_RATE = r"[\d.?]+(?:[kMG]?\w{0,12}/\w{1,12}(?:, [\w=.+-]+)*\]|s/it|it/s|s/i|it/|it|s/|s|i)?"
# A progress bar of tqdm 4 (``std.tqdm.format_meter``), whole or cut off after its rate. SGLang writes "25% Completed |".
#  50%|█████     | 4/8 [00:01<00:01,  2.38it/s]
_BAR = re.compile(
    r"(?P<percent>\d{1,3})%(?:\|[^|\r]{0,200}\|| Completed \|) *"
    r"(?P<done>[\d.]+[kMG]?)/(?P<total>[\d.]+[kMG]?) "
    rf"\[(?P<elapsed>[\d:]+)<(?:[\d:]+|\?)(?:, *(?:{_RATE})?)?\]?"
)
_MARKS = ("%|", "% Completed |")
_BAR_LABEL = re.compile(r"(?P<label>[^][|%\r: ][^][|%\r]{0,80}): +")
_STARTS = (
    # test/test_eval.py::TestX::test_mmlu [2026-01-24 18:15:48] ...
    ("test-start", re.compile(r"([\w./-]+\.py::[^\s\[]+(?:\[[^\]]*\])?) (?=\S|$)")),
    # Error: [2026-01-24 18:16:20] ...
    ("label", re.compile(r"(Output|Error|stdout|stderr): (?=\[|$)")),
)


def pieces(text: str) -> Iterator[tuple[str, str, re.Match[str] | None]]:
    """Split a line into pieces: each one's kind ("progress", "test-start", "label" or "text"), its text, and a bar's match.

    A line from a single writer is one piece of kind "text". The text before a colon and a bar is the bar's label.
    """
    for number, part in enumerate(text.split("\r")):
        if not part and number:
            continue
        start = 0
        if len(part) <= _LONGEST_BARS and any(mark in part for mark in _MARKS):
            for bar in _BAR.finditer(part):
                before = part[start : bar.start()]
                label = _BAR_LABEL.fullmatch(before)
                if before.strip() and not label:
                    yield from _labelled(before.rstrip(" "))
                yield "progress", label["label"] if label else "", bar
                start = bar.end()
        if start < len(part) or not start:
            yield from _labelled(part[start:])


def _labelled(text: str) -> Iterator[tuple[str, str, None]]:
    for kind, pattern in _STARTS:
        if match := pattern.match(text):
            yield kind, match[1], None
            text = text[match.end() :]
            if not text:
                return
    yield "text", text, None
