"""Known causes of a server's failure: its exception's message or its signal, and the one remedy that fits the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

UNKNOWN_REMEDY = "read its log; `assay doctor` checks this environment"


@dataclass(frozen=True)
class Situation:
    """The circumstances that a remedy depends on besides its cause.

    Attributes:
        device: "cpu" or "cuda".
        alone: whether no other server of the run is up, so that running them in turn changes nothing.
        share: the memory share that the server was given; 0 if its log does not state it.
    """

    device: str = "cuda"
    alone: bool = False
    share: float = 0.0

    def words(self, remedy: str) -> str:
        """Drop from a remedy what this situation rules out: "[beside: …]" needs another server up, "[cuda: …]" a GPU."""
        holds = {"beside": not self.alone, "cuda": self.device == "cuda"}
        return _CONDITIONAL.sub(lambda match: match[2] if holds[match[1]] else "", remedy)


_CONDITIONAL = re.compile(r"\[(beside|cuda): ([^\]]*)\]")
ANYWHERE = Situation()
"""Two servers on a GPU."""


@dataclass(frozen=True)
class _FailureCause:
    """A known cause of a server's failure.

    Attributes:
        id: stable, in kebab-case.
        pattern: matches the message of an exception of this cause.
        do: the remedy, with the pattern's groups as {0}, {1}, … and conditional parts (`Situation.words`); or a function of the
            match and the situation.
        anywhere: whether `pattern` is specific enough to count outside of an exception, as what a compiler prints.
    """

    id: str
    pattern: re.Pattern[str]
    do: str | Callable[[re.Match[str], Situation], str]
    anywhere: bool = False


def _share(match: re.Match[str], situation: Situation) -> str:
    """Return a memory share above the one that SGLang asks for; if two of them do not fit on the GPU, one server at a time."""
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
) -> _FailureCause:
    return _FailureCause(id_, re.compile(pattern, re.IGNORECASE | re.DOTALL), do, anywhere)


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
        "fix config.json in the model's folder, or download the model again",
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
        "repeat the command with NCCL_DEBUG=INFO, and fix what NCCL then names in the server's log",
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
        "backend-model",
        r"requires one of \['(\w+)'[^\]]*\] attention backend",
        "name a backend that this model can have: {0} (assay fingerprint --backend {0}, elsewhere --reference and --candidate)",
    ),
    _cause(
        "backend-device",
        r"(?:backend|kernel)\b[^\n]*(?:not supported|not available|only supports?|requires)[^\n]*|unsupported[^\n]*backend",
        "name a backend that this device and this SGLang have; assay backends lists them",
    ),
)
"""Known causes; the first one that fits counts."""

_CRASH = "native code crashed: run the kernel without a server (`assay check`); compute-sanitizer or a debugger names the line"
_KILLED = (
    "if the kernel log names it (dmesg -T | grep -i oom), memory ran out: free memory[beside: , use --servers=in-turn], or use a "
    "smaller --model; else leave the server alone, and repeat the command, which resumes"
)
OUT_OF_MEMORY = (
    "free memory on this machine, or raise the container's limit[beside: , use --servers=in-turn], "
    "or use a smaller --model"
)
ENDINGS = {
    "SIGKILL": ("killed", _KILLED),
    "SIGILL": ("illegal-instruction", "install builds of PyTorch and of the kernel that are made for this CPU"),
    "SIGBUS": (
        "bus-error",
        "make room in /dev/shm (df -h /dev/shm; docker run --shm-size=8g), and download cut files again",
    ),
    "SIGSEGV": ("crash", _CRASH),
    "SIGABRT": ("crash", _CRASH),
    "SIGFPE": ("crash", _CRASH),
    "SIGTERM": ("stopped", "find out what sends SIGTERM to the server, and repeat the command, which resumes"),
}
"""Known causes by the signal that ended a process which left no exception: id and remedy."""
EXIT = "take the call of exit (sys.exit, os._exit) out of the kernel's module and of what it imports"
KERNEL = "repair the kernel: `assay check` calls it on shapes of every kind, without a server"


def remedy(cause: _FailureCause, match: re.Match[str], situation: Situation) -> str:
    """Return the remedy of a cause that a pattern matched, in this situation."""
    if not isinstance(cause.do, str):
        return cause.do(match, situation)
    return situation.words(cause.do).format(*match.groups())
