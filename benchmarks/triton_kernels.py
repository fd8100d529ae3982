"""What `assay check` says of twelve textbook Triton kernels, and what that takes: compiled on a GPU, interpreted without one.

python benchmarks/triton_kernels.py [KERNEL ...] [-- FLAGS OF assay check]

The kernels are those of textbook_triton.py. Each is checked in a process of its own: one that accesses memory outside of its
tensors leaves a GPU's context unusable.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RIGHT = ("varlen", "paged", "split_kv")


def main() -> None:
    words, flags = sys.argv[1:], []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    table = Table("kernel", "is", "verdict", "exit code", "what is said", "s", "CPU s")
    wrong = 0
    for name in words or _names():
        begun, cpu = time.monotonic(), _cpu()
        document, code, said = _check(name, flags)
        seconds, cpu = time.monotonic() - begun, _cpu() - cpu
        sentence = _sentence(document) if document else said
        expected = 0 if name in RIGHT else 1
        # Without a GPU, what its environment cannot do keeps a right kernel from a whole pass.
        wrong += code != expected and not (expected == 0 and code == 3)
        table.add_row(
            name, "right" if expected == 0 else "wrong", document.get("verdict", "none"), str(code), sentence,
            f"{seconds:.1f}", f"{cpu:.1f}",
        )  # fmt: skip
        Console(stderr=True).print(f"{name}: {code}, {seconds:.1f} s", highlight=False)
    Console(width=180).print(table)
    sys.exit(int(wrong > 0))


def _names() -> list[str]:
    """The functions of the module that take a call, right ones first; the module is not imported, which would need Triton."""
    text = (HERE / "textbook_triton.py").read_text()
    return re.findall(r"^def ([a-z]\w*)\(call: AttentionCall\)", text, re.M)


def _check(name: str, flags: list[str]) -> tuple[dict[str, object], int, str]:
    """The document of a check, its exit code, and the end of what it wrote besides."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "assay", "check", f"textbook_triton:{name}", "--json", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    begin = done.stdout.find("{\n")
    document = json.loads(done.stdout[begin:]) if begin >= 0 else {}
    return document, done.returncode, done.stderr[-300:]


def _sentence(document: dict[str, object]) -> str:
    """What the first finding says, with what was read; of a kernel without findings, the headline."""
    findings = document["findings"]
    assert isinstance(findings, list)
    if not findings:
        return str(document["headline"])
    first = findings[0]
    return str(first["operator"] or first["diagnosis"])


def _cpu() -> float:
    """CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
