"""What a failed server's log says: the line that names the cause, and for a known cause what to do about it.

SGLang runs in several processes that write to one log. The process that fails writes a traceback; the others then fail because of
it, and the main process ends all of them with SIGKILL. So neither the end of the log nor the exit status names the cause.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from assay.harness.errors import EngineError
from assay.harness.text import one_line

LINE_LIMIT = 300
"""Characters of the line that names the cause; PyTorch's out-of-memory message goes on for three times as many."""
UNKNOWN_REMEDY = "read its log; `assay doctor` checks this environment"


@dataclass(frozen=True)
class Situation:
    """What a remedy depends on besides its cause.

    Attributes:
        device: "cpu" or "cuda".
        alone: whether no other server of the run is up, so that running them in turn changes nothing.
        share: the memory share that the server was given; 0 if its log does not say.
    """

    device: str = "cuda"
    alone: bool = False
    share: float = 0.0

    def words(self, remedy: str) -> str:
        """A remedy without what this situation rules out: "[beside: …]" counts if another server is up, "[cuda: …]" on a GPU."""
        holds = {"beside": not self.alone, "cuda": self.device == "cuda"}
        return _CONDITIONAL.sub(lambda match: match[2] if holds[match[1]] else "", remedy)


_CONDITIONAL = re.compile(r"\[(beside|cuda): ([^\]]*)\]")
ANYWHERE = Situation()
"""Two servers on a GPU."""


@dataclass(frozen=True)
class Cause:
    """A known cause of a server's failure.

    Attributes:
        id: stable, in kebab-case.
        pattern: what an exception that has this cause says.
        do: the remedy, with the pattern's groups as {0}, {1}, … and conditional parts (`Situation.words`); or a function of the
            match and the situation.
        anywhere: whether `pattern` is specific enough to count outside of an exception, as what a compiler prints.
    """

    id: str
    pattern: re.Pattern[str]
    do: str | Callable[[re.Match[str], Situation], str]
    anywhere: bool = False


@dataclass(frozen=True)
class Told:
    """What a log tells.

    Attributes:
        line: the line that names the cause, such as "ValueError: Loaded weights leave no GPU memory …"; empty if there is none.
        cause: id of a known cause; empty if it is not known.
        do: what to do.
        survivable: whether the server may have gone on after this line; it does not explain an end by a signal then.
    """

    line: str = ""
    cause: str = ""
    do: str = UNKNOWN_REMEDY
    survivable: bool = False


def _share(match: re.Match[str], situation: Situation) -> str:
    """A memory share above the one that SGLang asks for; if two of them do not fit on the GPU, one server at a time."""
    least = next((float(group) for group in match.groups() if group), situation.share)
    share = max(math.ceil((least + 0.02) * 20) / 20, 0.45)
    if share <= 0.45:  # two shares, and a tenth for what lies outside of them (`engines.memory`)
        return f"repeat the command with --engine-arg=--mem-fraction-static={share:.2f}"
    flag = f"--engine-arg=--mem-fraction-static={max(min(share, 0.9), 0.85):.2f}"
    return situation.words(
        f"[beside: one server at a time: ]repeat the command with [beside: --servers=in-turn ]{flag}"
    )


def _headers(match: re.Match[str], _: Situation) -> str:
    if match[1] == "Python.h":
        return "install Python's headers (Debian: apt-get install python3-dev), with which Triton compiles its launcher"
    return f"install the package with {match[1]} (CUDA's headers: the CUDA toolkit of the version that PyTorch was built for)"


def _cause(
    id_: str, pattern: str, do: str | Callable[[re.Match[str], Situation], str], anywhere: bool = False
) -> Cause:
    return Cause(id_, re.compile(pattern, re.IGNORECASE | re.DOTALL), do, anywhere)


CAUSES = (
    _cause(
        "gpu-shared",
        r"memory capacity is unbalanced|some GPUs may be occupied|less than desired GPU memory|memory usage increased during load",
        "something else takes GPU memory while the server loads: end it (nvidia-smi lists it)[beside: , or use --servers=in-turn]",
    ),
    _cause(
        "memory-share",
        r"leave no GPU memory for the KV cache(?:.*?above ([0-9.]*[0-9]))?|(?:increase|raise) --mem-fraction-static",
        _share,
    ),
    _cause(
        "gpu-memory",
        r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|OutOfMemoryError",
        "free GPU memory (nvidia-smi lists who holds it)[beside: , use --servers=in-turn], or use a smaller --model",
    ),
    _cause(
        "gpu-shared-memory",
        r"OutOfResources.*shared memory|out of resource: shared memory",
        "the kernel needs more shared memory than this GPU has: make its blocks smaller, or use fewer stages",
    ),
    _cause(
        "host-memory",
        r"DefaultCPUAllocator: (?:can't allocate|not enough)|Cannot allocate memory|\bMemoryError\b|not enough (?:host )?memory"
        r"|failed to map segment from shared object|std::bad_alloc",
        "free memory on this machine, or raise its limit (ulimit -v, the container's)[beside: , use --servers=in-turn], "
        "or use a smaller --model",
        anywhere=True,
    ),
    _cause(
        "threads",
        r"can't start new thread|pthread_create failed|Thread creation failed"
        r"|(?:BlockingIOError|RuntimeError).*Resource temporarily unavailable",
        "raise what limits threads: their number (ulimit -u, pids.max of the container), or memory for their stacks (ulimit -v)",
        anywhere=True,
    ),
    _cause(
        "jit-ninja",
        r"No such file or directory: '(?:\S*/)?ninja'|Ninja is required to load C\+\+ extensions|ninja: (?:command )?not found",
        "pip install ninja into the environment of the server, and have its bin folder on PATH",
        anywhere=True,
    ),
    _cause("jit-headers", r"fatal error: '?(\S+\.(?:h|hpp|cuh))'?(?:: No such file| file not found)", _headers, True),
    _cause(
        "jit-compiler",
        r"Failed to find C compiler|Could not find nvcc|CUDA_HOME environment variable is not set"
        r"|No such file or directory: '\S*(?:nvcc|gcc|cc|g\+\+|c\+\+)'|(?:nvcc|gcc|g\+\+): (?:command )?not found",
        "install what the kernels are compiled with: a C++ compiler, and the CUDA toolkit with CUDA_HOME set to its folder",
    ),
    _cause(
        "jit-build",
        r"Ninja build failed|\['ninja'.*returned non-zero|Error building extension|nvcc.*returned non-zero",
        "read the compiler's first error in the log; after a change of versions, delete ~/.cache/flashinfer and "
        "~/.cache/torch_extensions",
    ),
    _cause(
        "head-dim",
        r"(?:head[_ ]?(?:dim\w*|size)|headdim)\b.*(?:support|should be|must be|dispatch|at most|multiple|invalid|expected)"
        r"|(?:support|dispatch|invalid|unknown)\w*\b[^\n]{0,60}(?:head[_ ]?(?:dim\w*|size)|headdim)"
        r"|Lq in \{|NUM_MMA_D_QK=|num_frags_y=",
        "use a backend or kernel that has this head size (assay backends lists them), or a --model with another one",
    ),
    _cause(
        "architecture",
        r"Model architectures? .*(?:not supported|are not supported)|does not recognize this architecture"
        r"|has no SGLang implementation|is not a registered model",
        "use a --model that this SGLang supports, or install a newer SGLang",
    ),
    _cause(
        "shared-library",
        r"ImportError: \S*\.so[.\d]*: cannot open shared object|undefined symbol|Could not load any common_ops library"
        r"|GLIBC(?:XX)?_[\d.]+' not found",
        "install builds that fit together: sglang, sgl-kernel and torch of one release, for this version of CUDA",
    ),
    _cause(
        "missing-module",
        r"No module named '?([\w.]+)'?",
        "install {0} into the environment of the server; if it is yours, start assay in the folder that holds it",
    ),
    _cause(
        "missing-package",
        r"(\S+) with minimum required version (\S+) is not installed",
        "pip install '{0}>={1}' into the environment of the server, or use a backend that does not need it",
    ),
    _cause(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver|Torch not compiled with CUDA enabled|no CUDA-capable device"
        r"|CUDA driver version is insufficient|driver on your system is too old|No accelerator|libcuda\.so",
        "make nvidia-smi work here and install a CUDA build of PyTorch[cuda: , or use --device=cpu]",
    ),
    _cause(
        "gpu-architecture",
        r"no kernel image is available|only supports? (?:sm|compute)|requires (?:sm_?|compute capability|Hopper|Blackwell)"
        r"|SM ?\d+ (?:is|are) not supported|not supported on (?:this|your) GPU",
        "use a backend that is built for this GPU (assay backends lists them), or another GPU",
    ),
    _cause(
        "kernel-access",
        r"illegal memory access|misaligned address|device-side assert|unspecified launch failure",
        "a kernel reads or writes where it must not: `assay check` on the candidate finds the call, compute-sanitizer the line",
    ),
    _cause("port", r"address already in use|EADDRINUSE", "end what holds the port, and repeat the command", True),
    _cause(
        "flag",
        r"error: (?:unrecognized arguments|argument |the following arguments)",
        "correct --engine-arg; python -m sglang.launch_server --help lists its flags",
        anywhere=True,
    ),
    _cause(
        "tokenizer",
        r"Can't load tokenizer|Couldn't instantiate the backend tokenizer|Unable to load tokenizer|tokenizer\.(?:json|model)\b"
        r"|Tokenizer class \S+ does not exist|ModelWrapper|chat_template is not set",
        "save the tokenizer beside the weights (save_pretrained), or name another --model",
    ),
    _cause(
        "config",
        r"config\.json|JSONDecodeError|Unrecognized model in|not a valid JSON file|Can't load the configuration",
        "mend config.json in the model's folder, or download the model again",
    ),
    _cause(
        "weights-missing",
        r"Cannot find any model weights|no file named .*(?:safetensors|\.bin)|No such file or directory: '\S*\.safetensors'",
        "finish the download of the model's weights, or use --engine-arg=--load-format=dummy",
    ),
    _cause(
        "weights",
        r"SafetensorError|Error while deserializing header|incomplete metadata|PytorchStreamReader failed|InvalidHeader"
        r"|size mismatch for|not found in params_dict|invalid load key|HeaderTooLarge|failed finding central directory",
        "the model's files are damaged or of another model: download them again, or name another --model",
    ),
    _cause(
        "trust",
        r"trust_remote_code",
        "if you trust the model's code, --engine-arg=--trust-remote-code",
    ),
    _cause(
        "offline",
        r"GatedRepoError|OfflineModeIsEnabled|LocalEntryNotFoundError|couldn't connect to|401 Client Error|RepositoryNotFoundError",
        "download the model first (hf download; log in for gated ones), and name its folder with --model",
    ),
    _cause(
        "disk",
        r"No space left on device|Disk quota exceeded",
        "make room on the disk, in the temporary folder and in /dev/shm",
        anywhere=True,
    ),
    _cause("open-files", r"Too many open files", "raise the limit of open files: ulimit -n 65536"),
    _cause(
        "permission",
        r"PermissionError|Permission denied|Read-only file system",
        "let the user who runs assay read and write the path that the message names",
    ),
    _cause(
        "nccl",
        r"NCCL (?:error|WARN|failure)|ncclInternalError|ncclSystemError|ncclUnhandledCudaError",
        "repeat the command with NCCL_DEBUG=INFO, and mend what NCCL then names in the server's log",
    ),
    _cause(
        "context-length",
        r"context[_ -]length.*(?:greater|larger|exceeds|longer) than",
        "leave --context-length out, or name one that the model has",
    ),
    _cause(
        "kernel-contract",
        r"KernelRefused: \S+ returned ",
        "repair the kernel: `assay check` on it shows the call and what it must return",
    ),
    _cause(
        "kernel-import",
        r"KernelRefused: kernel .*cannot be imported: ",
        "repair the module: `assay check` on the kernel imports it without a server",
    ),
    _cause(
        "backend-device",
        r"(?:backend|kernel)\b[^\n]*(?:not supported|not available|only supports?|requires)[^\n]*|unsupported[^\n]*backend",
        "name a backend that this device and this SGLang have; assay backends lists them",
    ),
)
"""Known causes; the first one that fits counts."""

CRASH = "native code crashed: run the kernel without a server (`assay check`); compute-sanitizer or a debugger names the line"
KILLED = (
    "if the kernel log names it (dmesg -T | grep -i oom), memory ran out: free memory[beside: , use --servers=in-turn], or use a "
    "smaller --model; else leave the server alone, and repeat the command, which resumes"
)
OUT_OF_MEMORY = (
    "free memory on this machine, or raise the container's limit[beside: , use --servers=in-turn], "
    "or use a smaller --model"
)
ENDINGS = {
    "SIGKILL": ("killed", KILLED),
    "SIGILL": ("illegal-instruction", "install builds of PyTorch and of the kernel that are made for this CPU"),
    "SIGBUS": (
        "bus-error",
        "make room in /dev/shm (df -h /dev/shm; docker run --shm-size=8g), and download cut files again",
    ),
    "SIGSEGV": ("crash", CRASH),
    "SIGABRT": ("crash", CRASH),
    "SIGFPE": ("crash", CRASH),
    "SIGTERM": ("stopped", "find out what sends SIGTERM to the server, and repeat the command, which resumes"),
}
"""Known causes by the signal that ended a process which left no exception: id and remedy."""
EXIT = "take the call of exit (sys.exit, os._exit) out of the kernel's module and of what it imports"
KERNEL = "repair the kernel: `assay check` calls it on shapes of every kind, without a server"

_SIGNALS = {"Segmentation fault": "SIGSEGV", "Illegal instruction": "SIGILL", "Bus error": "SIGBUS", "Aborted": "SIGABRT",
            "Floating": "SIGFPE"}  # fmt: skip
_FAULT = re.compile(r"Fatal Python error: (.+)")
_FAULT_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+) in (\S+)')
_NOT_OURS = re.compile(r"/lib/python3[^/]*/|^<")
# What SGLang's main process says of a process of its own that has ended: its watchdog, and its start.
_DEATH = re.compile(
    r"Subprocess (\w+?)(?:_\d+)? \(pid=\d+\) crashed with exit code (-?\d+)"
    r"|Rank \d+ (scheduler) died during initialization \(exit code: (-?\d+)\)"
)
_TRACEBACK = "Traceback (most recent call last)"
_OF_A_SERVER = "hit an exception"
"""How SGLang's processes log the exception that ends them; others were survived, or ended a process with status 1."""
_IN_KERNEL = re.compile(r'\s+File "[^"]*", line \d+, in run_kernel$')
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+), in (\S+)')
_EXCEPTION = re.compile(r"(?!(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b)[A-Za-z_][\w.]*(?::\s|:?$)")
# How other processes, and SGLang's main process, fail because of the one that failed first.
_CONSEQUENCE = re.compile(
    r"(?:EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|SystemExit|asyncio\S*CancelledError)\b"
    r"|.*(?:scheduler died during initialization|Initialization failed\. Please see|child (?:process )?failed)"
)
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_STARTS_AN_ENTRY = re.compile(r"\[\d{4}-\d\d-\d\d|\d{4}-\d\d-\d\d |INFO:|WARNING:|ERROR:|\[rank\d|\[W\d|\[E\d")
_FATAL = re.compile(
    r"\berror:|\bfatal\b|terminate called|what\(\):|segmentation fault|core dumped|\bkilled\b|\baborted\b|out of memory",
    re.IGNORECASE,
)
_ENDS_ITSELF = re.compile(r"sigquit (?:received|from|for)", re.IGNORECASE)  # its settings name a handler, too
_SETTINGS = re.compile(r".*server_?args", re.IGNORECASE)  # they name hundreds of flags, and with them anything
_NO_LAST_WORDS = re.compile(
    r"\s|.*(?:warning|\d+%|://)|\[|usage: |nanobind|kill_process_tree|Process \S+:$|\^|Fatal Python", re.IGNORECASE
)
_ANSWERED = re.compile(r'"(?:GET|POST) /\S* HTTP/')
_SHARE = re.compile(r"mem_fraction_static'?[=:] ?([0-9.]+(?:e-?\d+)?)")
_STAMP = re.compile(r"\s*(?:\[[^\]]*\d\d:\d\d:\d\d[^\]]*\]\s*)?(?:(?:ERROR|CRITICAL|FATAL):?\s+)?")
_MESSAGE_LINES = 12


@dataclass(frozen=True)
class _Raised:
    """An exception in a log.

    Attributes:
        text: its line, and those of its message.
        chained: whether it was raised because of the one before.
        final: whether SGLang says that it ended a process.
        kernel: where in a kernel it was raised, as "mine.py, line 12, in forward"; empty if not in one.
    """

    text: str
    chained: bool
    final: bool
    kernel: str


def read(log: str, situation: Situation = ANYWHERE) -> Told:
    """What a server's log tells about its failure.

    Args:
        log: what the server wrote, from its launch on.
        situation: what the remedy depends on.
    """
    lines = log.splitlines()
    if share := _SHARE.search(log):
        situation = replace(situation, share=float(share[1]))
    chain = _last_chain(lines)
    died = _death(lines, situation)
    where = next((one.kernel for one in chain if one.kernel), "")
    survivable = not any(one.final for one in chain)
    # A process that an exception ended has status 1; one that a signal ended, or exit, had survived those that it logged.
    if chain and (died is None or died.cause == "" or not survivable):
        for one in chain:
            for cause in CAUSES:
                if match := cause.pattern.search(one.text):
                    return Told(_headline(one.text, where), cause.id, _remedy(cause, match, situation), survivable)
    for line in lines:
        for cause in CAUSES:
            if cause.anywhere and not _SETTINGS.match(line) and (match := cause.pattern.search(line)):
                return Told(_without_stamp(line), cause.id, _remedy(cause, match, situation))
    if died is not None and died.cause and survivable:
        return died
    if chain:
        line = _headline(chain[0].text, where)
        return Told(line, "kernel", KERNEL, survivable) if where else Told(line, survivable=survivable)
    if died is not None:  # with status 1, which sys.exit has if it is given a text
        return replace(died, cause="exit", do=EXIT)
    last = next((line for line in reversed(lines) if _FATAL.search(line) and not _SETTINGS.match(line)), "")
    return Told(_without_stamp(last), survivable=True)


def ended(
    who: str,
    how: str,
    when: str,
    log: str,
    tail: str,
    situation: Situation = ANYWHERE,
    *,
    process: str = "",
    out_of_memory: bool = False,
) -> EngineError:
    """The error of a server of which a process has ended.

    Args:
        who: "the candidate server (sage_attn)".
        how: how its process ended, in words: "exited with status 2".
        when: "during start-up" or "after it was ready".
        log: what it wrote.
        tail: the end of its log, as it is shown.
        situation: what the remedy depends on.
        process: which of its processes ended, as "sglang::scheduler"; empty for its main process, and so all of it.
        out_of_memory: whether the system has killed a process for want of memory since the server was started.
    """
    told = read(log, situation)
    itself = "SIGKILL" in how and bool(_ENDS_ITSELF.search(log))
    deadly = next((name for name in ENDINGS if how.endswith(name)), "")
    known = "SGLang ended its own processes" if itself else f"Its process {process} {how}" if process else f"It {how}"
    if deadly and not itself and (told.survivable or not told.line):
        told = Told("", ENDINGS[deadly][0], situation.words(ENDINGS[deadly][1]))
    elif process and not told.line:
        told = Told("", "exit", EXIT)
    said = told.line or (f"its process {process} {how}{_last_words(log.splitlines())}." if process else "")
    if out_of_memory and told.cause in ("killed", ""):
        told = Told(told.line, "out-of-memory", situation.words(OUT_OF_MEMORY))
        said = f"the system ran out of memory and killed it ({said.rstrip('.') or how})."
    return EngineError(
        f"{who} failed {when}: {said}" if said else f"{who} {how} {when}.",
        "a running server",
        told.do,
        details=f"{known} {when}.\n{tail}",
        cause=told.cause,
    )


def how_ended(status: int) -> str:
    """In words how a process ended, by its exit status or the negative number of a signal: "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    return (
        f"was killed by {signal.Signals(-status).name}"
        if -status in set(signal.Signals)
        else f"was killed by signal {-status}"
    )


def _remedy(cause: Cause, match: re.Match[str], situation: Situation) -> str:
    if not isinstance(cause.do, str):
        return cause.do(match, situation)
    return situation.words(cause.do).format(*match.groups())


def _death(lines: list[str], situation: Situation) -> Told | None:
    """What a log says of a process that ended without an exception; with status 1, which an exception has, not its cause."""
    for number, line in enumerate(lines):
        if (match := _FAULT.search(line)) and (name := next((n for n in _SIGNALS if match[1].startswith(n)), "")):
            cause, do = ENDINGS[_SIGNALS[name]]
            return Told(
                f"{one_line(match[0], LINE_LIMIT)}{_fault_place(lines[number + 1 :])}", cause, situation.words(do)
            )
    for number, line in enumerate(lines):
        if not (match := _DEATH.search(line)):
            continue
        status, which = int(match[2] or match[4]), match[1] or match[3]
        how = how_ended(status)
        said = f"its {which} {how}{_last_words(lines[:number])}"
        if status > 0:
            return Told(said, "exit" if status > 1 else "", EXIT if status > 1 else UNKNOWN_REMEDY)
        cause, do = ENDINGS.get(how.rpartition(" ")[2], ("", UNKNOWN_REMEDY))
        return Told(said, cause, situation.words(do))
    return None


def _fault_place(lines: list[str]) -> str:
    """Where Python was when it crashed: the innermost frame that is not of a library, else the innermost."""
    frames: list[re.Match[str]] = []
    start = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    for line in lines[start + 1 :]:
        if not (match := _FAULT_FRAME.match(line)):
            break
        frames.append(match)
    if not frames:
        return ""
    frame = next((one for one in frames if not _NOT_OURS.search(one[1])), frames[0])
    return f" in {frame[3]} ({frame[1].rpartition('/')[2]}, line {frame[2]})"


def _last_words(lines: list[str]) -> str:
    """What a process printed before it ended, where that is no entry of a log."""
    before = next((n for n, line in enumerate(lines) if _TRACEBACK in line and "hit an" not in line), len(lines))
    words = next((line for line in reversed(lines[:before]) if line.strip() and not _ANSWERED.search(line)), "")
    return "" if not words or _NO_LAST_WORDS.match(words) else f', after it wrote "{one_line(words, 160)}"'


def _last_chain(lines: list[str]) -> list[_Raised]:
    """The last exception that is no consequence of another process's end, and those that led to it; the last first.

    A server survives exceptions of optional imports and logs them, so earlier ones do not count.
    """
    chains: list[list[_Raised]] = []
    for raised in _exceptions(lines):
        if raised.chained and chains:
            chains[-1].append(raised)
        else:
            chains.append([raised])
    failed = [chain for chain in chains if not _CONSEQUENCE.match(chain[-1].text)]
    final = [chain for chain in failed if any(one.final for one in chain)]
    return next(iter((final or failed)[-1:]), [])[::-1]


def _exceptions(lines: list[str]) -> Iterator[_Raised]:
    """Each traceback's exception. One without a message gets the source line that raised it."""
    for number, line in enumerate(lines):
        if _TRACEBACK not in line:
            continue
        at = next((n for n in range(number + 1, len(lines)) if _EXCEPTION.match(lines[n])), None)
        if at is None:
            continue
        said = [lines[at]]
        for more in lines[at + 1 : at + _MESSAGE_LINES]:
            if _TRACEBACK in more or _STARTS_AN_ENTRY.match(more) or _CHAINED.match(more):
                break
            said.append(more)
        if ":" not in lines[at] and not "".join(said[1:]).strip():
            source = next((one.strip() for one in reversed(lines[number:at]) if one.strip(" ~^")), "")
            said = [f"{lines[at]}: {source}"]
        before = lines[max(number - 3, 0) : number]
        yield _Raised(
            "\n".join(said), any(map(_CHAINED.match, before)), _OF_A_SERVER in line, _in_kernel(lines[number:at])
        )


def _in_kernel(traceback: list[str]) -> str:
    """The innermost frame of a kernel that raised, outside of libraries if there is one; empty if assay did not call a kernel."""
    called = next((n for n, line in enumerate(traceback) if _IN_KERNEL.match(line)), None)
    if called is None:
        return ""
    frames = [match for line in traceback[called + 1 :] if (match := _FRAME.match(line))]
    own = [frame for frame in frames if not _NOT_OURS.search(frame[1])] or frames
    return f"{own[-1][1].rpartition('/')[2]}, line {own[-1][2]}, in {own[-1][3]}" if own else ""


def _without_stamp(line: str) -> str:
    """A line of a log without its time and level."""
    return one_line(line[_STAMP.match(line).end() :].strip(), LINE_LIMIT)  # type: ignore[union-attr]  # it matches nothing, too


def _headline(said: str, where: str = "") -> str:
    """The line of an exception, with the first line of its message, if that begins on the next one, and where it was raised."""
    first, *rest = (line.strip() for line in said.splitlines() if line.strip())
    place = f" ({where})" if where else ""
    return one_line(f"{first} {rest[0]}" if first.endswith(":") and rest else first, LINE_LIMIT - len(place)) + place
