"""Kinds of lines that stand on their own, by the words that they begin with.

Read in SGLang 0.5.17 to 0.5.23 (``sglang/srt``, ``sglang/test``, ``sglang/bench_*``), uvicorn 0.51, pytest 9.0, PyTorch 2.13
(``torch/_inductor/select_algorithm.py``) and huggingface_hub 1.x, and seen in their logs. A rule is about what a program prints
wherever it runs, never about one file; what no rule is about stays unread.
"""

from __future__ import annotations

import re
from functools import lru_cache

# A pattern that matches all of a text, its kind (an id in kebab-case), and the kind of notice that it is; empty for none.
_Rule = tuple[re.Pattern[str], str, str]
_GB = r"-?[\d.]+ GB"
# How a line of SGLang begins that reports an option it chose by itself.
_CHOICE = r"(?:Us(?:e|ing)|Detected|Auto-\w+|Automatically|Inferred|Defaulting|Set(?:ting)?|Enabl(?:e|ed|ing)|Resolved)"


_RECORDS = (
    # Start: model, memory, graphs.
    ("chat-template", r"Using default HuggingFace chat template with detected content format: \w+"),
    ("chat-template", r"(?:Detected|Inferred|Auto-detected|Use|Using|Loading|No) .*chat template.*"),
    ("distributed", rf"Init (?:torch distributed|parallel) (?:begin|ends)\.(?: elapsed=[\d.]+ s)?,?(?: ?mem usage={_GB})?\.?"),
    ("distributed", r"(?:sglang is using nccl==|NCCL version|Custom allreduce|Setup Custom allreduce|Using pynccl).*"),
    ("distributed", r"init_(?:threads_binding|cpu_threads_env)\b.*"),
    ("moe-backend", r"MOE_RUNNER_BACKEND is not initialized, the backend will be automatically selected"),
    ("model-not-importable", r"Ignore import error when loading [\w.]+: .*|Ignore import error when loading [\w.]+:"),
    ("weights-begin", rf"Load weight begin\. avail mem={_GB}"),
    ("weights-found", r"(?:Found local HF snapshot for|Using model weights format|No model\.safetensors\.index\.json found) .*"),
    ("weights-end", rf"Load weight end\. (?:elapsed=[\d.]+ s, )?type=\w+, (?:\w+=[\w.]+, )*avail mem={_GB}(?:, mem.*)?"),
    ("kv-dtype", r"Using KV cache dtype: [\w.]+"),
    ("kv-cache", rf"KV Cache is allocated\. (?:dtype: [\w.]+, )?#tokens: \d+, K(?:V)? size: {_GB}(?:, V size: {_GB})?\.?"),
    ("memory-baseline", rf"Memory (?:baseline taken|pool end)\.(?: (?:avail mem|mem usage)={_GB})?"),
    ("backend-ready", r"\w[\w -]* backend initialized\. [\w=, .-]+"),
    ("backend-choice", r"(?:Attention backend not (?:explicitly )?specified|Use \w+ backend|Using \w+ (?:as )?attention).*"),
    ("graph-begin", rf"Capture (?:\w+ )*(?:cuda|cpu|CUDA|CPU) graph begin\. .*avail mem={_GB}"),
    ("graph-sizes", r"Capture (?:\w+ )*(?:cuda|cpu|CUDA|CPU) graph (?:bs|num tokens) \[[\d, ]*\]"),
    ("graph-end", rf"Capture (?:\w+ )*(?:cuda|cpu|CUDA|CPU) graph end\. \w[\w ]*[:=] ?[\d.]+ s[.,]? ?(?:\w[\w ]*={_GB}[.,]? ?)*"),
    ("feature-off", r"(?:Disabl(?:e|ed|ing) \w.*|[\w ]+ (?:is|are) disabled\b.*)"),
    ("sizes", rf"max_total_num_tokens=\d+, chunked_prefill_size=-?\w+, (?:[a-z_]+=[^,]+, )*available_[a-z]+_mem={_GB}"),
    ("radix-cache", r"(?:Init Unified Radix Cache|Tree cache initialized|Using (?:Radix|Chunk|SWA)\w*Cache).*"),
    ("timings", r"Engine startup timings \(s\): .*"),
    ("process-limits", r"Fail to set RLIMIT_\w+: .*|SGLANG_CPU_OMP_THREADS_BIND is set .*|Cannot detect CUDA architecture\."),
    ("sampling-defaults", r"Using default chat sampling params from model generation config: \{.*\}"),
    ("reranker-ids", r"Reranker yes/no token IDs: yes=\d+, no=\d+|Using fallback token IDs for yes/no \(\d+/\d+\)"),
    ("api-off", r"OpenAI Responses API \(/v1/responses\) disabled: .*"),
    ("ready", r"The server is fired up and ready to roll!"),
    ("cache-flushed", r"Cache flushed successfully!|Cache not flushed because .*"),
    ("profiler", r"Profil(?:ing|er) (?:starts|done|stops|started|stopped)\b.*|Stop profiling\.*"),
    ("uvicorn", r"INFO: +(?:(?:Started|Finished) server process \[\d+\]|Shutting down)"),
    ("uvicorn", r"INFO: +(?:Waiting for a|A)pplication (?:startup|shutdown)(?: complete)?\."),
    ("uvicorn", r"INFO: +(?:Uvicorn running on \S+|Waiting for [\w ]+\.) \((?:Press )?CTRL\+C to (?:force )?quit\)"),
    ("end", r"Subprocess \w+ \(pid=\d+\) crashed with exit code -15\..*"),  # the signal with which a server is ended
    ("end", r"(?:SIGTERM|SIGINT|SIGQUIT) received\. .*|Gracefully exiting\.\.\. .*|kill_process_tree called: .*"),
    ("empty-record", r""),
    # What matters.
    ("kernel-not-loaded", r"(?:Failed to|Could not|Unable to) (?:load|import|initialize|compile) .*", "kernel-not-loaded"),
    ("offline-retry", r"WARNING _http\.py:\d+: Retrying in [\d.]+s \[Retry \d+/\d+\]\.", "offline-retry"),
    ("offline-retry", r"WARNING _http\.py:\d+: .*thrown while requesting (?:HEAD|GET) \S+", "offline-retry"),
    ("crash", r"Subprocess \w+ \(pid=\d+\) crashed with exit code -?\d+\..*|Received sigquit from a child process\..*", "crash"),
    ("crash", r"(?:\w+ hit an exception|\w+ watchdog timeout|Health check failed|CUDA out of memory|Out of memory)\b.*", "crash"),
    ("retract", r"(?:KV cache pool is full|Decode out of memory happened)\. Retract requests\. .*", "retract"),
    ("deprecated", r"(?:\x1b\[[\d;]*m)?.*(?:is|are|been) deprecated\b.*(?:\x1b\[[\d;]*m)?"),
    ("fallback", r"(?i:.*\b(?:fall(?:s|ing)? ?back|fell back|roll(?:s|ing)? back|fallback)\b.*)", "fallback"),
    ("option-chosen", rf"{_CHOICE} \w.*", "option-chosen"),
    ("loading", r"(?:Loading|Loaded|Downloading|Start(?:ing)? load(?:ing)?) \w.*"),
    ("request-dump", r"(?:Receive|Finish): obj=.*"),
    ("levelled-record", r"(?:WARNING|ERROR|CRITICAL):? +(?:[\w.]+\.py:\d+:|[\w.]+:) .*", "warning"),
)  # fmt: skip
_BARE = (
    # A server, without a time.
    ("distributed", r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+"),
    ("offline-retry", r"'?\(?MaxRetryError\(.*thrown while requesting (?:HEAD|GET) \S+", "offline-retry"),
    ("offline-retry", r"Retrying in [\d.]+s \[Retry \d+/\d+\]\.", "offline-retry"),
    ("profiler", r"USDT:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ \w+\.cpp:\d+\] \w+"),
    ("leaks", r"nanobind: (?:leaked \d+ \w+!|this is likely caused by .*)| - leaked \w+ .*| - \.\.\. skipped remainder|See https://nanobind\S+"),
    ("kernel-call", r"={80}"),
    # Autotuning by Inductor.
    ("autotune", r"Autotune Choices Stats:|AUTOTUNE \w+\(.*\)|strides: \[.*\]|dtypes: [\w., ]+"),
    ("autotune", r'\{"num_choices": \d+, .*\}'),
    ("autotune", r"  [\w.]+ (?:[\d.]+|inf) ms [\d.]+% ?.*"),
    ("autotune", r"\w+ AUTOTUNE benchmarking takes [\d.]+ seconds and [\d.]+ seconds precompiling for \d+ choices"),
    # Benchmarks and evaluations of SGLang.
    ("tokens", r"#(?:Input|Output) tokens: \d+"),
    ("bench-phase", r"(?:Warmup|Benchmark)\.\.\.|Starting (?:warmup|initial single prompt test run|main benchmark run).*"),
    ("sampler", r"ChatCompletionSampler initialized with self\.system_message=.*"),
    ("results-file", r"Writing (?:report|results) to \S+"),
    # pytest and unittest.
    ("test-method", r"\[CI Test Method\] [\w.]+"),
    ("pytest-header", r"platform \w+ -- Python \d\S*, pytest-\S+, pluggy-\S+(?: -- \S+)?"),
    ("pytest-header", r"hypothesis profile '[\w-]+'.*"),
    ("pytest-header", r"(?:cachedir|rootdir|configfile|plugins|testpaths|asyncio): \S.*"),
    ("pytest-header", r"collect(?:ing|ed) (?:\.\.\. ?)?(?:collected )?(?:\d+ items?)?(?: / .*)?"),
    ("unittest", r"Ran \d+ tests? in [\d.]+s|OK(?: \(.*\))?|-{70}|={70}"),
    ("pytest-docs", r"-- Docs: https://docs\.pytest\.org/\S+"),
    ("pytest-reruns", r"!+ .* !+"),
    ("response", r"(?:[A-Z]\w* )?(?:[Rr]esponse|[Oo]utput)(?: \d+)?: .*"),
    ("blank", r""),
)  # fmt: skip
_FIRST_WORD = re.compile(r"[A-Za-z_#'\[][\w#'./]*(?: |$)")


class _LineKinds:
    """A table of rules, which finds the one that a text follows by its first word."""

    def __init__(self, rows: tuple[tuple[str, ...], ...]) -> None:
        self._by_word: dict[str, list[_Rule]] = {}
        self._any: list[_Rule] = []
        for row in rows:
            rule = (re.compile(row[1], re.DOTALL), row[0], row[2] if len(row) > 2 else "")
            word = _FIRST_WORD.match(row[1])
            if word and "|" not in row[1]:
                self._by_word.setdefault(word.group().rstrip(), []).append(rule)
            else:
                self._any.append(rule)

    @lru_cache(4096)  # noqa: B019 - there are two tables, and logs repeat themselves
    def of(self, text: str) -> tuple[str, str]:
        """Find the kind of a text that follows a rule from end to end, and the notice that it is; both empty if there is none."""
        for pattern, kind, notice in (*self._by_word.get(text.partition(" ")[0], ()), *self._any):
            if pattern.fullmatch(text):
                return kind, notice
        return "", ""


RECORDS = _LineKinds(_RECORDS)
"""What SGLang logs behind its time."""
BARE = _LineKinds(_BARE)
"""Lines without a time."""


# Characters of a line in which progress bars are looked for.
_LONGEST = 20_000
_RATE = r"[\d.?]+(?:[kMG]?\w{0,12}/\w{1,12}(?:, [\w=.+-]+)*\]|s/it|it/s|s/i|it/|it|s/|s|i)?"
# A progress bar of tqdm 4 (``std.tqdm.format_meter``), whole or cut off behind its rate; SGLang writes "25% Completed |".
_BAR = re.compile(
    r"(?P<percent>\d{1,3})%(?:\|[^|\r]{0,200}\|| Completed \|) *"
    r"(?P<done>[\d.]+[kMG]?)/(?P<total>[\d.]+[kMG]?) "
    rf"\[(?P<elapsed>[\d:]+)<(?:[\d:]+|\?)(?:, *(?:{_RATE})?)?\]?"
)
_LABEL = re.compile(r"(?P<label>[^][|%\r: ][^][|%\r]{0,80}): +")
_STARTS = ("Output: ", "Error: ", "stdout: ", "stderr: ")
_MARKS = ("%|", "% Completed |")
_TEST = re.compile(r"(?P<id>[\w./-]+\.py::[^\s\[]+(?:\[[^\]]*\])?) (?=\S|$)")
_PREFIX = re.compile(r"(?P<name>Output|Error|stdout|stderr): (?=\[|$)")


# A piece of a line: its kind ("progress", "test-start", "label" or "text"), its text,
# and of a progress bar the text before its colon and its two numbers as they are written.
_LinePiece = tuple[str, str, tuple[str, str, str]]
_NO_BAR = ("", "", "")


def plain(text: str) -> bool:
    """Return True if nothing on the line points to more than one piece; `split` is then not needed."""
    return (
        "\r" not in text
        and not any(mark in text for mark in _MARKS)
        and ".py::" not in text
        and not text.startswith(_STARTS)
    )


def split(text: str) -> list[_LinePiece]:
    """Split a line; a line of one writer is one piece of kind "text"."""
    pieces: list[_LinePiece] = []
    for part in text.split("\r") if "\r" in text else (text,):
        if part or not pieces:
            _split(part, pieces)
    return pieces


def _split(text: str, pieces: list[_LinePiece]) -> None:
    start = 0
    if "%" in text and len(text) <= _LONGEST and any(mark in text for mark in _MARKS):
        for bar in _BAR.finditer(text):
            before = text[start : bar.start()]
            label = _LABEL.fullmatch(before)
            if before.strip() and not label:
                _labels(before.rstrip(" "), pieces)
            numbers = (label["label"] if label else "", bar["done"], bar["total"])
            pieces.append(("progress", bar.group(), numbers))
            start = bar.end()
    if start < len(text) or not pieces:
        _labels(text[start:], pieces)


def _labels(text: str, pieces: list[_LinePiece]) -> None:
    for kind, pattern in (("test-start", _TEST), ("label", _PREFIX)):
        match = pattern.match(text)
        if match:
            pieces.append((kind, match[1], _NO_BAR))
            text = text[match.end() :]
            if not text:
                return
    pieces.append(("text", text, _NO_BAR))
