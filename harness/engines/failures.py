"""What a failed server's log says: the line that names the cause, and for a known cause what to do about it.

SGLang runs in several processes that write to one log. The process that fails writes a traceback; the others then fail because of
it, and the main process ends all of them with SIGKILL. So neither the end of the log nor the exit status names the cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from assay.harness.errors import EngineError
from assay.harness.text import one_line

LINE_LIMIT = 300
"""Characters of the line that names the cause; PyTorch's out-of-memory message goes on for three times as many."""
UNKNOWN_REMEDY = "read its log; `assay doctor` checks this environment"


@dataclass(frozen=True)
class Cause:
    """A known cause of a server's failure.

    Attributes:
        id: stable, in kebab-case.
        pattern: what an exception that has this cause says.
        do: the remedy, with the pattern's groups as {0}, {1}, …; or a function of the match.
        anywhere: whether `pattern` is specific enough to count outside of an exception, as what a compiler prints.
    """

    id: str
    pattern: re.Pattern[str]
    do: str | Callable[[re.Match[str]], str]
    anywhere: bool = False


@dataclass(frozen=True)
class Told:
    """What a log tells.

    Attributes:
        line: the line that names the cause, such as "ValueError: Loaded weights leave no GPU memory …"; empty if there is none.
        cause: id of a known cause; empty if it is not known.
        do: what to do.
    """

    line: str = ""
    cause: str = ""
    do: str = UNKNOWN_REMEDY


def _share(match: re.Match[str]) -> str:
    """A memory share above the one that SGLang asks for; if two of them do not fit on the GPU, one server at a time."""
    least = next((float(group) for group in match.groups() if group), 0.0)
    share = max(math.ceil((least + 0.02) * 20) / 20, 0.45)
    if share <= 0.45:  # two shares, and a tenth for what lies outside of them (`engines.memory`)
        return f"repeat the command with --engine-arg=--mem-fraction-static={share:.2f}"
    share = max(min(share, 0.9), 0.85)
    return f"one server at a time: repeat the command with --servers=in-turn --engine-arg=--mem-fraction-static={share:.2f}"


def _headers(match: re.Match[str]) -> str:
    if match[1] == "Python.h":
        return "install Python's headers (Debian: apt-get install python3-dev), with which Triton compiles its launcher"
    return f"install the package with {match[1]} (CUDA's headers: the CUDA toolkit of the version that PyTorch was built for)"


def _cause(id_: str, pattern: str, do: str | Callable[[re.Match[str]], str], anywhere: bool = False) -> Cause:
    return Cause(id_, re.compile(pattern, re.IGNORECASE | re.DOTALL), do, anywhere)


CAUSES = (
    _cause(
        "gpu-shared",
        r"memory capacity is unbalanced|some GPUs may be occupied|less than desired GPU memory|memory usage increased during load",
        "something else takes GPU memory while the server loads: end it (nvidia-smi lists it), or use --servers=in-turn",
    ),
    _cause(
        "memory-share",
        r"leave no GPU memory for the KV cache(?:.*?above ([0-9.]*[0-9]))?|(?:increase|raise) --mem-fraction-static",
        _share,
    ),
    _cause(
        "gpu-memory",
        r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|OutOfMemoryError",
        "free GPU memory (nvidia-smi lists who holds it), use --servers=in-turn, or a smaller --model",
    ),
    _cause(
        "gpu-shared-memory",
        r"OutOfResources.*shared memory|out of resource: shared memory",
        "the kernel needs more shared memory than this GPU has: make its blocks smaller, or use fewer stages",
    ),
    _cause(
        "host-memory",
        r"DefaultCPUAllocator: can't allocate|Cannot allocate memory|\bMemoryError\b|not enough (?:host )?memory",
        "free memory on this machine, use --servers=in-turn, or a smaller --model",
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
        "make nvidia-smi work here and install a CUDA build of PyTorch, or use --device=cpu",
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
        "weights",
        r"SafetensorError|Error while deserializing header|incomplete metadata|PytorchStreamReader failed|InvalidHeader"
        r"|size mismatch for|not found in params_dict",
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
    _cause("disk", r"No space left on device", "make room on the disk, in the temporary folder and in /dev/shm"),
    _cause("open-files", r"Too many open files", "raise the limit of open files: ulimit -n 65536"),
    _cause(
        "backend-device",
        r"(?:backend|kernel)\b[^\n]*(?:not supported|not available|only supports?|requires)[^\n]*|unsupported[^\n]*backend",
        "name a backend that this device and this SGLang have; assay backends lists them",
    ),
)
"""Known causes; the first one that fits counts."""

_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"(?!(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b)[A-Za-z_][\w.]*(?::\s|:?$)")
# How other processes, and SGLang's main process, fail because of the one that failed first.
_CONSEQUENCE = re.compile(
    r"(?:EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|SystemExit|asyncio\S*CancelledError)\b"
    r"|.*(?:scheduler died during initialization|Initialization failed\. Please see|child (?:process )?failed)"
)
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_STARTS_AN_ENTRY = re.compile(r"\[\d{4}-\d\d-\d\d|\d{4}-\d\d-\d\d |INFO:|WARNING:|ERROR:|\[rank\d|\[W\d|\[E\d")
_FATAL = re.compile(
    r"\berror:|fatal|terminate called|what\(\):|segmentation fault|core dumped|\bkilled\b|abort", re.IGNORECASE
)
_MESSAGE_LINES = 12


def read(log: str) -> Told:
    """What a server's log tells about its failure.

    Args:
        log: what the server wrote, from its launch on.
    """
    lines = log.splitlines()
    said = _last_chain(lines)
    for text in said:
        for cause in CAUSES:
            if match := cause.pattern.search(text):
                return Told(_headline(text), cause.id, _remedy(cause, match))
    for line in lines:
        for cause in CAUSES:
            if cause.anywhere and (match := cause.pattern.search(line)):
                return Told(one_line(line.strip(), LINE_LIMIT), cause.id, _remedy(cause, match))
    if said:
        return Told(_headline(said[0]))
    last = next((line for line in reversed(lines) if _FATAL.search(line)), "")
    return Told(one_line(last.strip(), LINE_LIMIT))


def ended(who: str, how: str, when: str, log: str, tail: str) -> EngineError:
    """The error of a server whose process has ended.

    Args:
        who: "the candidate server (sage_attn)".
        how: how its process ended, in words: "exited with status 2".
        when: "during start-up" or "after it was ready".
        log: what it wrote.
        tail: the end of its log, as it is shown.
    """
    told = read(log)
    itself = "SIGKILL" in how and (told.line or "sigquit" in log.lower())
    known = "SGLang ended its own processes" if itself else f"It {how}"
    return EngineError(
        f"{who} failed {when}: {told.line}" if told.line else f"{who} {how} {when}.",
        "a running server",
        told.do
        if told.line or not how.endswith("SIGKILL")
        else "see whether memory ran out (dmesg); use --servers=in-turn",
        details=f"{known} {when}.\n{tail}",
        cause=told.cause,
    )


def _remedy(cause: Cause, match: re.Match[str]) -> str:
    return cause.do.format(*match.groups()) if isinstance(cause.do, str) else cause.do(match)


def _last_chain(lines: list[str]) -> list[str]:
    """The texts of the last exception that is no consequence of another process's end, and of those that led to it; the last first.

    A server survives exceptions of optional imports and logs them, so earlier ones do not count.
    """
    chains: list[list[str]] = []
    for text, continues in _exceptions(lines):
        if continues and chains:
            chains[-1].append(text)
        else:
            chains.append([text])
    failed = [chain for chain in chains if not _CONSEQUENCE.match(chain[-1])]
    return failed[-1][::-1] if failed else []


def _exceptions(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """The text of each traceback's exception, and whether it was raised because of the one before.

    One without a message gets the source line that raised it.
    """
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
        yield "\n".join(said), any(_CHAINED.match(before) for before in lines[max(number - 3, 0) : number])


def _headline(said: str) -> str:
    """The line of an exception; with the first line of its message, if that begins on the next one."""
    first, *rest = (line.strip() for line in said.splitlines() if line.strip())
    return one_line(f"{first} {rest[0]}" if first.endswith(":") and rest else first, LINE_LIMIT)
