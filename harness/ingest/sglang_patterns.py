"""Patterns for the lines of a log, by kind. Each follows an example line, unless the pattern is nearly the line itself.

Sources: logs of vLLM 0.6 to 0.27 (how an engine ends, and the prefix of each line); the code and logs of SGLang 0.4.6 to 0.5.23
(``sglang/srt``, ``sglang/test``, ``sglang/bench_*``), uvicorn 0.51, pytest 9.0, PyTorch 2.13
(``torch/_inductor/select_algorithm.py``) and huggingface_hub 1.x. A pattern describes a program's output on any machine, never a
single file. A line that matches no pattern stays unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from assay.harness.tracebacks import CHAINED

NUMBER = r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_GB = r"-?[\d.]+ GB"
_GRAPH = r"Capture (?:\w+ )*(?:cuda|cpu|CUDA|CPU) graph"
# Beginning of an SGLang line about an option that it chose by itself.
_CHOICE = r"(?:Us(?:e|ing)|Detected|Auto-\w+|Automatically|Inferred|Defaulting|Set(?:ting)?|Enabl(?:e|ed|ing)|Resolved)"
# Further figures of a batch: ", token usage: 0.00, #running-req: 0, #queue-req: 0, "
_TAIL = r"(?:, [#\w][\w #()/.-]*: [^\s,:\[\]]+)*(?:, ?)?"

# Beginnings of lines without any fact to report: lines logged by SGLang and uvicorn, and printed lines.
_LOGGED = """
Init torch distributed |Init parallel |sglang is using nccl==|NCCL version|Custom allreduce|Setup Custom allreduce|
Using pynccl|init_threads_binding|init_cpu_threads_env|MOE_RUNNER_BACKEND is not initialized|
Ignore import error when loading |Load weight begin.|Found local HF snapshot for |Using model weights format|
No model.safetensors.index.json found |Using KV cache dtype: |Memory pool end.|Memory baseline taken.|
Attention backend not specified|Attention backend not explicitly specified|Init Unified Radix Cache|Tree cache initialized|
Using Radix|Using Chunk|Using SWA|Engine startup timings (s): |Fail to set RLIMIT_|Reranker yes/no token IDs:|
SGLANG_CPU_OMP_THREADS_BIND is set |Cannot detect CUDA architecture.|Using default chat sampling params |
Using fallback token IDs for|OpenAI Responses API (/v1/responses) disabled: |The server is fired up and ready to roll!|
Cache flushed |Cache not flushed |Profiling|Profiler |Stop profiling|SIGTERM received.|SIGINT received.|SIGQUIT received.|
Gracefully exiting...|kill_process_tree called:|INFO:     Started server process|INFO:     Finished server process|
INFO:     Shutting down|INFO:     Waiting for|INFO:     Application |INFO:     Uvicorn running on |Receive: obj=|Finish: obj=
"""
_PRINTED = """
[Gloo] Rank |nanobind: | - leaked | - ... skipped remainder|See https://nanobind|Autotune Choices Stats:|AUTOTUNE |strides: [|
dtypes:|{"num_choices": |#Input tokens: |#Output tokens: |Warmup...|Benchmark...|Starting warmup|
Starting initial single prompt test run|Starting main benchmark run|Writing report to |Writing results to |[CI Test Method] |
platform |hypothesis profile '|cachedir: |rootdir:|configfile: |plugins: |testpaths: |asyncio: |
-- Docs: https://docs.pytest.org/|collecting |collected |OK (
"""


def _beginning(beginnings: str) -> str:
    names = beginnings.replace("\n", "").split("|")
    return f"(?:{'|'.join(map(re.escape, names))}).*"


_RECORDS = (
    # A server's activity. "Prefill batch." and "Prefill batch [12]" are older forms.
    # Prefill batch, #new-seq: 1, #new-token: 41, #cached-token: 77, token usage: 0.00, #running-req: 0, #queue-req: 0,
    ("prefill", rf"Prefill batch(?: \[\d+\])?[,.] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)(?=,){_TAIL}"),
    # Decode batch, #running-req: 18, #token: 3456, token usage: 0.03, cuda graph: True, gen throughput (token/s): 96.49,
    ("decode", rf"Decode batch(?: \[\d+\])?[,.] #running-req: (\d+)(?=,){_TAIL}"),
    # INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK
    # Group 1: a request for an answer.
    ("request",
     r'INFO: +[\w.:-]+ - "(?:(POST /(?:v1/chat/completions|v1/completions|generate))|[A-Z]+ \S+?)(?:\?\S*)? HTTP/[\d.]+" (\d{3})'
     r"(?: [A-Za-z -]+)?"),
    # Start: model, memory, graphs.
    ("weights-end", rf"Load weight end\. (?:elapsed=[\d.]+ s, )?type=\w+, (?:\w+=[\w.]+, )*avail mem={_GB}(?:, mem.*)?"),
    ("kv-cache", rf"KV Cache is allocated\. (?:dtype: [\w.]+, )?#tokens: \d+, K(?:V)? size: {_GB}(?:, V size: {_GB})?\.?"),
    ("graph-sizes", rf"{_GRAPH} (?:bs|num tokens) \[[\d, ]*\]"),
    ("graph-end", rf"{_GRAPH} end\. \w[\w ]*[:=] ?[\d.]+ s[.,]? ?(?:\w[\w ]*={_GB}[.,]? ?)*"),
    ("sizes", rf"max_total_num_tokens=\d+, chunked_prefill_size=-?\w+, (?:[a-z_]+=[^,]+, )*available_[a-z]+_mem={_GB}"),
    # Lines without any fact to report.
    ("quiet", _beginning(_LOGGED)),
    ("quiet", r"(?:Detected|Inferred|Auto-detected|Use|Using|Loading|No) .*chat template.*|\w[\w -]* backend initialized\. .*"),
    ("quiet", rf"(?:Use \w+ backend|Using \w+ (?:as )?attention|{_GRAPH} begin\.).*"),
    ("quiet", r"(?:Disabl(?:e|ed|ing) \w.*|[\w ]+ (?:is|are) disabled\b.*)"),
    ("quiet", r"Subprocess \w+ \(pid=\d+\) crashed with exit code -15\..*|"),  # the signal with which a server is ended
    # Lines that matter.
    ("kernel-not-loaded", r"(?:Failed to|Could not|Unable to) (?:load|import|initialize|compile) .*"),
    ("offline-retry", r"WARNING _http\.py:\d+: Retrying in [\d.]+s \[Retry \d+/\d+\]\."),
    ("offline-retry", r"WARNING _http\.py:\d+: .*thrown while requesting (?:HEAD|GET) \S+"),
    ("crash", r"Subprocess \w+ \(pid=\d+\) crashed with exit code -?\d+\..*|Received sigquit from a child process\..*"),
    ("crash", r"(?:\w+ hit an exception|\w+ watchdog timeout|Health check failed|CUDA out of memory|Out of memory)\b.*"),
    # vLLM: EngineCore encountered a fatal error.
    ("crash", r"(?:CPU )?EngineCore (?:failed to start|encountered a fatal error)\..*|WorkerProc failed to start\..*"),
    ("crash", r"(?:Engine core|Worker) proc \S+ died unexpectedly, .*"),
    ("crash", r"(?:AsyncLLM output_handler|Engine background task) failed\b.*"),
    ("retract", r"(?:KV cache pool is full|Decode out of memory happened)\. Retract requests\. .*"),
    ("quiet", r"(?:\x1b\[[\d;]*m)?.*(?:is|are|been) deprecated\b.*(?:\x1b\[[\d;]*m)?"),
    ("fallback", r"(?i:.*\b(?:fall(?:s|ing)? ?back|fell back|roll(?:s|ing)? back|fallback)\b.*)"),
    ("option-chosen", rf"{_CHOICE} \w.*"),
    ("quiet", r"(?:Loading|Loaded|Downloading|Start(?:ing)? load(?:ing)?) \w.*|(?:Receive|Finish): obj=.*"),
    ("warning", r"(?:WARNING|ERROR|CRITICAL):? +(?:[\w.]+\.py:\d+:|[\w.]+:) .*"),
)  # fmt: skip
_BARE = (
    ("crash", r"Fatal Python error: .*|(?:Killed|Aborted|Segmentation fault)(?: +\(core dumped\))?"),
    ("offline-retry", r"'?\(?MaxRetryError\(.*thrown while requesting (?:HEAD|GET) \S+"),
    ("offline-retry", r"Retrying in [\d.]+s \[Retry \d+/\d+\]\."),
    # ChatCompletionSampler initialized with self.system_message=None self.temperature=0.0 self.max_tokens=2048 ...
    ("sampler", r"ChatCompletionSampler initialized with self\.system_message=.*"),
    ("quiet", _beginning(_PRINTED)),
    # Autotuning by Inductor; answers; rules and ends of pytest and unittest.
    ("quiet", r"  [\w.]+ (?:[\d.]+|inf) ms [\d.]+% ?.*|\w+ AUTOTUNE benchmarking takes .*|USDT:[\d: -]+ \w+\.cpp:\d+\] \w+"),
    ("quiet", r"(?:[A-Z]\w* )?(?:[Rr]esponse|[Oo]utput)(?: \d+)?: .*"),
    ("quiet", rf"!+ .* !+|Ran \d+ tests? in [\d.]+s|OK|-{{70}}|={{70}}|{CHAINED.pattern}|"),
)  # fmt: skip
_STATED = (
    # FAILED                                                                    [ 75%]
    ("outcome", r"(?P<outcome>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS|RERUN)(?: \(.*\))?(?: +\[ *\d+%\])?"),
    # test_mmlu (__main__.TestX) ... FAIL
    ("outcome", r"(?P<id>\w+ \([\w.]+\)) \.\.\. (?P<outcome>ok|FAIL|ERROR|skipped .*|expected failure)?"),
    # command=python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct
    ("command", r"(?:command=|\+ |\$ )(\S.*)"),
    # [METRIC] mmlu_score=0.125 labels={"model": "meta-llama/Llama-3.1-8B-Instruct", "eval": "mmlu"}
    ("number", rf"\[METRIC\] ([\w./-]+)=({NUMBER}|nan|inf)(?: labels=\{{.*\}})?"),
    # Total latency: 64.467 s
    ("number", r"(Total latency|Score|Accuracy|Invalid|Latency|Output throughput|acc_length|speed): "
               rf"({NUMBER})(?: ?(?:s|token/s|%))?"),
    # output_throughput=97.5
    ("number", rf"([a-z]\w*)=({NUMBER})"),
    # {'other': np.float64(0.1875), 'other:std': np.float64(0.39), 'score': np.float64(0.125)}
    ("scores", rf"\{{(?:'[^']{{1,80}}': (?:np\.\w+\()?(?:{NUMBER}|nan)\)?(?:, |\}}$))+"),
)  # fmt: skip
# Lines that begin or end blocks of several lines.
_HEADINGS = (
    # =========================== short test summary info ============================
    ("section",
     r"={3,} (test session starts|warnings summary|(?:short|rerun) test summary info|FAILURES|ERRORS|PASSES|slowest .*) ={3,}"),
    # ==================== 1 failed, 3 passed, 1 warning in 319.15s (0:05:19) ====================
    ("counts",
     r"(?:={3,} )?((?:\d+ (?:failed|passed|skipped|deselected|xfailed|xpassed|warnings?|errors?|rerun)(?:, )?)+ in [\d.]+s"
     r"(?: \([\d:]+\))?|no tests ran in [\d.]+s)(?: ={3,})?"),
    # ====== Offline Throughput Benchmark Result =======
    ("title", r"=+ *((?:\w[\w ]{0,80})?Result) *=+"),
)  # fmt: skip
# Lines of a section of pytest's output, by the titles of `_HEADINGS`, and of a benchmark's table.
_FAILURES = (
    # __________________________________ test_mmlu ___________________________________
    ("failed", r"_{3,} (?:ERROR at (?:setup|teardown) of )?([^_ ].*?) _{3,}"),
    # E       assert 0.125 >= 0.6
    ("raised", r"E {3,}(\S.*)"),
    # test_eval.py:3: AssertionError
    ("place", r"(?P<file>[\w./<>-]+):(?P<line>\d+): (?P<kind>[A-Za-z_]\w*)"),
    # >       assert score >= 0.6
    ("quiet", r"_{3,} .+ _{3,}|(?:_ )+_?|[\w./<>-]+:\d+: (?:in \S+|\w*)|E {3,}.*|E|> {3,}.*|-{3,} Captured .* -{3,}|\w+ += .*"),
)  # fmt: skip
_SUMMARY = (
    # FAILED test_eval.py::test_mmlu - assert 0.125 >= 0.6
    ("summary",
     r"(?P<outcome>FAILED|PASSED|ERROR|SKIPPED|XFAIL|XPASS)(?: \[\d+\])? (?P<id>\S+::\S+|\S+\.py(?::\d+)?)"
     r"(?: - (?P<why>.*)|:? .*)?"),
)  # fmt: skip
_DURATIONS = (("quiet", r"[\d.]+s (?:call|setup|teardown) +\S+|\(\d+ durations < [\d.]+s hidden\..*\)"),)
# test_eval.py::test_mmlu
_WARNINGS = (("quiet", r"\S+\.py:\d+|\S+::\S+|\S+\.py: \d+ warnings?|  \S.*|    .*|  "),)
_ROWS = (
    # Output token throughput (tok/s):         96.49
    ("row", r"([A-Z][\w (),/.%#-]*): +(\S+)\s*"),
    ("quiet", r"-{4}[\w ()-]*-{4}"),
    ("rows_end", r"=+"),
)
_FIRST_WORD = re.compile(r"[A-Za-z_#'\[][\w#'./]*(?: |$)")


class LineTable:
    """Patterns by kind, in order of trial. A pattern that begins with a word is tried only on texts that begin with it."""

    def __init__(self, rows: tuple[tuple[str, str], ...]) -> None:
        self._by_word: dict[str, list[tuple[re.Pattern[str], str]]] = {}
        self._any: list[tuple[re.Pattern[str], str]] = []
        for kind, pattern in rows:
            word = _FIRST_WORD.match(pattern)
            group = self._by_word.setdefault(word[0].rstrip(), []) if word and "|" not in pattern else self._any
            group.append((re.compile(pattern, re.DOTALL), kind))

    @lru_cache(4096)  # noqa: B019 - there are a few tables, and logs repeat themselves
    def find(self, text: str) -> tuple[str, re.Match[str] | None]:
        """Find the kind of a text that a pattern matches completely, and the match, or ("", None) if no pattern does."""
        for pattern, kind in (*self._by_word.get(text.partition(" ")[0], ()), *self._any):
            if match := pattern.fullmatch(text):
                return kind, match
        return "", None


RECORDS, STATED, BARE, HEADINGS = LineTable(_RECORDS), LineTable(_STATED), LineTable(_BARE), LineTable(_HEADINGS)
"""SGLang's lines after their time; facts in lines without a time; other lines without a time; beginnings of blocks."""
_FAILED, _SUMMED = LineTable(_FAILURES), LineTable(_SUMMARY)
SECTIONS = {
    "FAILURES": _FAILED, "ERRORS": _FAILED, "PASSES": _FAILED, "warnings summary": LineTable(_WARNINGS),
    "short test summary info": _SUMMED, "rerun test summary info": _SUMMED, "slowest": LineTable(_DURATIONS),
    "table": LineTable(_ROWS),
}  # fmt: skip
"""Lines of a block, by the block's title."""

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
