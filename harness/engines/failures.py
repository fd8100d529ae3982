"""Reads a failed server's log: the line that names the cause, and, for a known cause, what to do about it.

Engines run in several processes that write to one log. The process that fails writes a traceback; the others then fail because of
it, and the main process ends all of them, SGLang's with SIGKILL, vLLM's with status 0. So neither the end of the log nor the exit
status names the cause. An engine's profile adds what only that engine writes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from assay.harness.errors import EngineError
from assay.harness.sides import Engine, profile_of
from assay.harness.text import how_ended, one_line
from assay.harness.tracebacks import CHAINED, HEADER, Frame, Traceback, Tracebacks

_IN_TURN = "if two servers share the machine, --servers=in-turn"

_EXIT = "take the call of exit (sys.exit, os._exit) out of the kernel's module and of its imports"
# (id of the cause, pattern of an exception's message or of how a process ended, remedy with the pattern's groups). The first row
# that fits counts, of the engine's own ones first.
# fmt: off
CAUSES: tuple[tuple[str, str, str], ...] = (
    ("gpu-shared", r"memory capacity is unbalanced|GPUs may be occupied|less than desired GPU memory|increased during load",
     f"something else takes GPU memory while the server loads: end it (nvidia-smi lists it), or, {_IN_TURN}"),
    ("gpu-memory", r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|OutOfMemoryError",
     f"free GPU memory (nvidia-smi lists who holds it), or use a smaller --model, or, {_IN_TURN}"),
    ("gpu-shared-memory", r"OutOfResources.*shared memory|out of resource: shared memory",
     "the kernel needs more shared memory than this GPU has: make its blocks smaller, or use fewer stages"),
    ("host-memory", r"DefaultCPUAllocator: (?:can't allocate|not enough)|Cannot allocate memory|\bMemoryError\b"
     r"|not enough (?:host )?memory|failed to map segment from shared object|std::bad_alloc",
     f"free memory on this machine, or raise its limit (ulimit -v, the container's), or use a smaller --model, or, {_IN_TURN}"),
    ("threads", r"can't start new thread|pthread_create failed|Thread creation failed"
     r"|(?:BlockingIOError|RuntimeError).*Resource temporarily unavailable",
     "raise what limits threads: their number (ulimit -u, pids.max of the container), or memory for their stacks (ulimit -v)"),
    ("jit-ninja", r"directory: '(?:\S*/)?ninja'|Ninja is required to load C\+\+ extensions|ninja: (?:command )?not found",
     "pip install ninja into the environment of the server, and have its bin folder on PATH"),
    ("jit-headers", r"fatal error: '?Python\.h'?(?:: No such file| file not found)",
     "install Python's headers (Debian: apt-get install python3-dev), with which Triton compiles its launcher"),
    ("jit-headers", r"fatal error: '?(\S+\.(?:h|hpp|cuh))'?(?:: No such file| file not found)",
     "install the package with {0} (CUDA's headers: the CUDA toolkit of the version that PyTorch was built for)"),
    ("jit-compiler", r"Failed to find C compiler|Could not find nvcc|CUDA_HOME environment variable is not set"
     r"|No such file or directory: '\S*(?:nvcc|gcc|cc|g\+\+|c\+\+)'|(?:nvcc|gcc|g\+\+): (?:command )?not found",
     "install what the kernels are compiled with: a C++ compiler, and the CUDA toolkit with CUDA_HOME set to its folder"),
    ("jit-build", r"Ninja build failed|\['ninja'.*returned non-zero|Error building extension|nvcc.*returned non-zero",
     "read the compiler's first error in the log; after a change of versions, delete ~/.cache/flashinfer and torch_extensions"),
    ("head-dim", r"(?:head[_ ]?(?:dim\w*|size)|headdim)\b.*(?:support|should be|must be|dispatch|at most|multiple|invalid|expected)"
     r"|(?:support|dispatch|invalid|unknown)\w*\b[^\n]{0,60}(?:head[_ ]?(?:dim\w*|size)|headdim)"
     r"|Lq in \{|NUM_MMA_D_QK=|num_frags_y=",
     "use a backend or kernel that has this head size (assay backends lists them), or a --model with another one"),
    ("architecture", r"Model architecture.* supported|not recognize this architecture|no \w+ implementation|a registered model",
     "use a --model that this engine supports, or install a newer version of it"),
    ("shared-library", r"ImportError: \S*\.so[.\d]*: cannot open shared object|undefined symbol"
     r"|Could not load any common_ops library|GLIBC(?:XX)?_[\d.]+' not found",
     "install builds that fit together: the engine, its kernels and torch of one release, for this version of CUDA"),
    ("missing-module", r"No module named '?([\w.]+)'?",
     "install {0} into the environment of the server; if it is yours, start assay in the folder that holds it"),
    ("missing-package", r"(\S+) with minimum required version (\S+) is not installed",
     "pip install '{0}>={1}' into the environment of the server, or use a backend that does not need it"),
    ("no-gpu", r"No CUDA GPUs are available|Found no NVIDIA driver|Torch not compiled with CUDA enabled"
     r"|no CUDA-capable device|CUDA driver version is insufficient|driver on your system is too old|No accelerator|libcuda\.so",
     "make nvidia-smi work here and install a CUDA build of PyTorch, or use --device=cpu"),
    ("gpu-architecture", r"no kernel image is available|only supports? (?:sm|compute)"
     r"|requires (?:sm_?|compute capability|Hopper|Blackwell)|SM ?\d+ (?:is|are) not supported|not supported on (?:this|your) GPU",
     "use a backend that is built for this GPU (assay backends lists them), or another GPU"),
    ("kernel-access", r"illegal memory access|misaligned address|device-side assert|unspecified launch failure",
     "a kernel reads or writes where it must not: `assay check` on the candidate finds the call, compute-sanitizer the line"),
    ("port", r"address already in use|EADDRINUSE", "end what holds the port, and repeat the command"),
    ("flag", r"error: (?:unrecognized arguments|argument |the following arguments)",
     "correct --engine-arg; the module of the launch command lists its flags with --help"),
    ("tokenizer", r"Can't load tokenizer|Couldn't instantiate the backend tokenizer|Unable to load tokenizer"
     r"|tokenizer\.(?:json|model)\b|Tokenizer class \S+ does not exist|ModelWrapper|chat_template is not set",
     "save the tokenizer next to the weights (save_pretrained), or name another --model"),
    ("config", r"config\.json|JSONDecodeError|Unrecognized model in|not a valid JSON file|Can't load the configuration",
     "fix config.json in the model's folder, or download the model again"),
    ("weights-missing", r"Cannot find any model weights|no file named .*(?:safetensors|\.bin)|directory: '\S*\.safetensors'",
     "finish the download of the model's weights, or use --engine-arg=--load-format=dummy"),
    ("weights", r"SafetensorError|Error while deserializing header|incomplete metadata|PytorchStreamReader failed|InvalidHeader"
     r"|size mismatch for|not found in params_dict|invalid load key|HeaderTooLarge|failed finding central directory",
     "the model's files are damaged or of another model: download them again, or name another --model"),
    ("trust", r"trust_remote_code", "if you trust the model's code, --engine-arg=--trust-remote-code"),
    ("offline", r"GatedRepoError|OfflineModeIsEnabled|(?:LocalEntry|Repository)NotFoundError|couldn't connect to|401 Client Error",
     "download the model first (hf download; log in for gated ones), and name its folder with --model"),
    ("disk", r"No space left on device|Disk quota exceeded", "make room on the disk, in the temporary folder and in /dev/shm"),
    ("open-files", r"Too many open files", "raise the limit of open files: ulimit -n 65536"),
    ("permission", r"PermissionError|Permission denied|Read-only file system",
     "let the user who runs assay read and write the path that the message names"),
    ("nccl", r"NCCL (?:error|WARN|failure)|ncclInternalError|ncclSystemError|ncclUnhandledCudaError",
     "repeat the command with NCCL_DEBUG=INFO, and fix what NCCL then names in the server's log"),
    ("context-length", r"context[_ -]length.*(?:greater|larger|exceeds|longer) than",
     "leave --context-length out, or name one that the model has"),
    ("kernel-contract", r"KernelRefused: \S+ returned ",
     "repair the kernel: `assay check` on it shows the call and the expected output"),
    ("kernel-import", r"KernelRefused: kernel .*cannot be imported: ",
     "repair the module: `assay check` on the kernel imports it without a server"),
    ("backend-model", r"requires one of \['(\w+)'[^\]]*\] attention backend",
     "name a backend that this model can have: {0} (assay fingerprint --backend {0}, elsewhere --reference and --candidate)"),
    ("backend-device", r"(?:backend|kernel)\b[^\n]*(?:not (?:supported|available)|only support|requires)|unsupported[^\n]*backend",
     "name a backend that this device and this engine have; assay backends lists them"),
    ("killed", r"was killed by SIGKILL",
     f"if the kernel log names it (dmesg -T | grep -i oom), memory ran out: free memory, use a smaller --model, or, {_IN_TURN}; "
     "else leave the server alone, and repeat the command, which resumes"),
    ("illegal-instruction", r"was killed by SIGILL|Python error: Illegal instruction",
     "install builds of PyTorch and of the kernel that are made for this CPU"),
    ("bus-error", r"was killed by SIGBUS|Python error: Bus error",
     "make room in /dev/shm (df -h /dev/shm; docker run --shm-size=8g), and download cut files again"),
    ("crash", r"was killed by SIG(?:SEGV|ABRT|FPE)|Python error: (?:Segmentation fault|Aborted|Floating)",
     "native code crashed: run the kernel without a server (`assay check`); compute-sanitizer or a debugger names the line"),
    ("exit", r"its \w+ exited with status (?!1\b)", _EXIT),  # 1 follows an exception, too
    ("stopped", r"was killed by SIGTERM", "find out what sends SIGTERM to the server, and repeat the command, which resumes"),
)
# fmt: on
# Causes whose patterns are specific enough to count outside exceptions, such as in a compiler's output.
_ANYWHERE = ("host-memory", "threads", "jit-ninja", "jit-headers", "port", "flag", "disk")
_OUT_OF_MEMORY = f"free memory on this machine, raise the container's limit, use a smaller --model, or, {_IN_TURN}"
_KERNEL = "repair the kernel: `assay check` calls it on shapes of every kind, without a server"
_UNKNOWN = "read its log; `assay doctor` checks this environment"

_LINE_LIMIT = 300  # PyTorch's out-of-memory message goes on for three times as many characters
_FAULT = re.compile(r"Fatal Python error: (?:Segmentation fault|Illegal instruction|Bus error|Aborted|Floating)[^\n]*")
_FAULT_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+) in (\S+)')
_LIBRARY = re.compile(r"/lib/python3[^/]*/|^<")
# Messages of a main process about a child that has ended: from its watchdog, and from its start.
_DEATH = re.compile(
    r"Subprocess (\w+?)(?:_\d+)? \(pid=\d+\) crashed with exit code (-?\d+)"
    r"|Rank \d+ (scheduler) died during initialization \(exit code: (-?\d+)\)"
)
# How processes log the exception that ends them (SGLang, vLLM's engine); others were survived, or ended a process with status 1.
_ENDS_A_PROCESS = re.compile(
    r"hit an exception|EngineCore encountered a fatal error|EngineCore failed to start|WorkerProc failed"
)
# How other processes, and the main process, fail because of the one that failed first.
_CONSEQUENCE = re.compile(
    r"(?:EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|SystemExit|asyncio\S*CancelledError)\b"
    r"|.*(?:scheduler died during initialization|Initialization failed\. Please see|child (?:process )?failed"
    r"|EngineDeadError|Engine core initialization failed|WorkerProc initialization failed|EngineCore encountered an issue)"
)
_ENDS_A_MESSAGE = re.compile(
    r"\[\d{4}-\d\d-\d\d|\d{4}-\d\d-\d\d |INFO:|WARNING:|ERROR:|\[rank\d|\[W\d|\[E\d|.*Traceback \(|" + CHAINED.pattern
)
_FATAL = re.compile(
    r"(?i)\b(?:error:|fatal\b|killed\b|aborted\b)|terminate called|what\(\):|segmentation fault|core dumped|out of memory"
)
_ENDS_ITSELF = re.compile(r"(?i)sigquit (?:received|from|for)")  # its settings name a handler, too
_SETTINGS = re.compile(r"(?i).*server_?args")  # they name hundreds of flags, and with them anything
_NO_LAST_WORDS = re.compile(
    r"(?i)\s|.*(?:warning|\d+%|://)|\[|usage: |nanobind|kill_process_tree|Process \S+:$|\^|Fatal Python"
)
_ANSWERED = re.compile(r'"(?:GET|POST) /\S* HTTP/')
_STAMP = re.compile(r"^\s*(?:\[[^\]]*\d\d:\d\d:\d\d[^\]]*\]\s*)?(?:(?:ERROR|CRITICAL|FATAL):?\s+)?")


class Failure(NamedTuple):
    """The line of a log that names the cause, the id of a known cause, and what to do."""

    line: str = ""
    cause: str = ""
    do: str = _UNKNOWN
    survivable: bool = False  # whether the server may have gone on, so that this does not explain an end by a signal


class _Raised(NamedTuple):
    text: str
    ends_a_process: bool
    kernel: str  # where in a kernel, or ""


def read(log: str, engine: Engine = "sglang") -> Failure:
    """Find in the log of an engine's server, from its launch on, why it failed."""
    lines, causes = log.splitlines(), (*profile_of(engine).causes, *CAUSES)
    chain, died = _last_chain(lines), _death(lines)
    where = next((raised.kernel for raised in chain if raised.kernel), "")
    survivable = not any(raised.ends_a_process for raised in chain)
    # A process that an exception ended has status 1; one that ended by a signal or by exit survived the exceptions that it logged.
    silent = _known(died, causes) if survivable else None
    for raised in () if silent else chain:
        if known := _known(raised.text, causes):
            return Failure(_headline(raised.text, where), *known, survivable)
    for line in lines:
        if not _SETTINGS.match(line) and (known := _known(line, causes, _ANYWHERE)):
            return Failure(one_line(_STAMP.sub("", line, 1), _LINE_LIMIT), *known)
    if silent:
        return Failure(died, *silent)
    if chain:
        cause = ("kernel", _KERNEL) if where else ("", _UNKNOWN)
        return Failure(_headline(chain[0].text, where), *cause, survivable)
    if died:  # with status 1, which sys.exit has if it is given a text
        return Failure(died, "exit", _EXIT)
    last = next((line for line in reversed(lines) if _FATAL.search(line) and not _SETTINGS.match(line)), "")
    return Failure(one_line(_STAMP.sub("", last, 1), _LINE_LIMIT), survivable=True)


def ended(
    engine: Engine, who: str, how: str, when: str, log: str, tail: str, *, process: str = "",
    out_of_memory: bool = False,
) -> EngineError:  # fmt: skip
    """Make the error of a server after one of its processes has ended.

    Args:
        how: how its process ended: "exited with status 2".
        when: "during start-up" or "after it was ready".
        log: its log.
        tail: the end of its log, as shown to the user.
        process: which of its processes ended, such as "scheduler", or empty for its main process, and so all of it.
        out_of_memory: whether the OOM killer has killed a process since the server was started.
    """
    failure = read(log, engine)
    itself = "SIGKILL" in how and bool(_ENDS_ITSELF.search(log))
    who_ended = f"Its process {process}" if process else "It"
    known = f"{profile_of(engine).title} ended its own processes" if itself else f"{who_ended} {how}"
    deadly = None if itself else _known(how, CAUSES)
    if deadly and (failure.survivable or not failure.line):
        failure = Failure("", *deadly)
    elif process and not failure.line:
        failure = Failure("", "exit", _EXIT)
    said = failure.line or (f"its process {process} {how}{_last_words(log.splitlines())}." if process else "")
    if out_of_memory and failure.cause in ("killed", ""):
        failure = Failure(failure.line, "out-of-memory", _OUT_OF_MEMORY)
        said = f"the system ran out of memory and killed it ({said.rstrip('.') or how})."
    return EngineError(
        f"{who} failed {when}: {said}" if said else f"{who} {how} {when}.",
        "a running server",
        failure.do,
        details=f"{known} {when}.\n{tail}",
        cause=failure.cause,
    )


def _known(text: str, causes: Sequence[tuple[str, str, str]], only: Collection[str] = ()) -> tuple[str, str] | None:
    """Return the id and the remedy of the first cause that a text matches, or None."""
    for cause, pattern, remedy in causes:
        if (not only or cause in only) and (match := re.search(pattern, text, re.IGNORECASE | re.DOTALL)):
            return cause, remedy.format(*match.groups())
    return None


def _death(lines: list[str]) -> str:
    """Return how a process ended without an exception, with its last output, or return "" if none did."""
    for number, line in enumerate(lines):
        if match := _FAULT.search(line):
            start = next((n for n in range(number, len(lines)) if lines[n].startswith("Current thread")), len(lines))
            inner = itertools.takewhile(bool, map(_FAULT_FRAME.match, lines[start + 1 :]))
            frames = [Frame(frame[1], int(frame[2]), frame[3]) for frame in inner if frame]
            return one_line(match[0], _LINE_LIMIT) + _place(frames[::-1])
    for number, line in enumerate(lines):
        if match := _DEATH.search(line):
            return f"its {match[1] or match[3]} {how_ended(int(match[2] or match[4]))}{_last_words(lines[:number])}"
    return ""


def _place(frames: Sequence[Frame]) -> str:
    """Return the innermost frame, outside libraries if possible, in brackets."""
    inner = ([known for known in frames if not _LIBRARY.search(known.file)] or frames)[-1:]
    return "".join(f" ({frame.file.rpartition('/')[2]}, line {frame.line}, in {frame.name})" for frame in inner)


def _last_words(lines: list[str]) -> str:
    """Return the text that a process printed before it ended, outside its log's entries."""
    before = next((n for n, line in enumerate(lines) if HEADER in line and "hit an" not in line), len(lines))
    words = next((line for line in reversed(lines[:before]) if line.strip() and not _ANSWERED.search(line)), "")
    return "" if not words or _NO_LAST_WORDS.match(words) else f', after it wrote "{one_line(words, 160)}"'


def _last_chain(lines: list[str]) -> list[_Raised]:
    """Return the last exception that is not a consequence of another process's end, and those that led to it; the last first.

    A server survives exceptions of optional imports and logs them, so earlier ones do not count.
    """
    tracebacks: list[Traceback] = []
    reader = Tracebacks(tracebacks.append, patience=math.inf)
    for number, line in enumerate(lines):
        reader.line(number, line)
    chains: list[list[_Raised]] = []
    for trace in (trace for trace in tracebacks if trace.exception):
        if not chains or not any(map(CHAINED.match, lines[max(trace.first - 3, 0) : trace.first])):
            chains.append([])
        chains[-1].append(_raised(trace, lines))
    failed = [chain for chain in chains if not _CONSEQUENCE.match(chain[-1].text)]
    final = [chain for chain in failed if any(raised.ends_a_process for raised in chain)]
    return next(iter((final or failed)[-1:]), [])[::-1]


def _raised(trace: Traceback, lines: list[str]) -> _Raised:
    """Return a traceback's exception. One without a message gets the source line that raised it."""
    at = trace.exception_line
    more = itertools.takewhile(lambda line: not _ENDS_A_MESSAGE.match(line), lines[at + 1 : at + 12])
    said = "\n".join([trace.exception, *more])
    if ":" not in trace.exception and said.strip() == trace.exception:
        said += ": " + next((line.strip() for line in reversed(lines[trace.first : at]) if line.strip(" ~^")), "")
    called = next((n for n, known in enumerate(trace.frames, 1) if known.name == "run_kernel"), len(trace.frames))
    return _Raised(said, bool(_ENDS_A_PROCESS.search(trace.before)), _place(trace.frames[called:]))


def _headline(said: str, where: str = "") -> str:
    """Return an exception's line, with its message's first line if that begins on the next one, and where it was raised."""
    first, *rest = (line.strip() for line in said.splitlines() if line.strip())
    return one_line(f"{first} {rest[0]}" if first.endswith(":") and rest else first, _LINE_LIMIT - len(where)) + where
