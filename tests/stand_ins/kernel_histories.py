"""Synthetic kernel repositories of any history, created by git fast-import within a second. Used by benchmarks and tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

KERNEL = '''"""Attention, commit {number}."""
import torch

REVISION = {number}


def forward(call):
    out = torch.empty(call.q.shape[0], call.q.shape[1], call.v.shape[2], dtype=call.q.dtype)
    group = call.q.shape[1] // call.k.shape[1]
    q0 = k0 = 0
    for new, length in zip(call.cu_seqlens_q.diff().tolist(), call.cu_seqlens_k.diff().tolist()):
        q, k, v = call.q[q0:q0 + new].float(), call.k[k0:k0 + length].float(), call.v[k0:k0 + length].float()
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        offset = {offset}
        mask = torch.arange(length)[None, :] <= torch.arange(new)[:, None] + offset
        logits = (torch.einsum("qhd,khd->hqk", q, k) * {scale}).masked_fill(~mask, float("-inf"))
        out[q0:q0 + new] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).to(out.dtype)
        q0, k0 = q0 + new, k0 + length
    return out
'''
BROKEN = "def forward(call):\n    return (\n"


@dataclass(frozen=True)
class Made:
    """A created repository: its folder, and its commits in topological order."""

    path: Path
    commits: tuple[str, ...]
    parents: tuple[tuple[int, ...], ...]


def source(number: int, mask_wrong: bool, scale_wrong: bool = False) -> str:
    """Source of a kernel; optionally with a top-left causal mask, or without its scale."""
    offset = "0" if mask_wrong else "length - new"
    return KERNEL.format(number=number, offset=offset, scale="1.0" if scale_wrong else "call.scale")


def straight(count: int) -> list[tuple[int, ...]]:
    """Parents of a history without merges."""
    return [(i - 1,) if i else () for i in range(count)]


def descendants(parents: Sequence[tuple[int, ...]], origin: int) -> set[int]:
    """A commit and all of its descendants."""
    found = {origin}
    for i, own in enumerate(parents):
        if any(p in found for p in own):
            found.add(i)
    return found


def make(path: Path, parents: Sequence[tuple[int, ...]], text: Callable[[int], str | None]) -> Made:
    """Create a repository: `text` gives ``attn.py`` at commit i; None leaves the file out."""
    path.mkdir(parents=True)
    git(path, "init", "--quiet", "--initial-branch=main")
    stream = []
    for i, own in enumerate(parents):
        message = f"Change {i}"
        stream.append(f"commit refs/heads/main\nmark :{i + 1}\ncommitter A B <a@b.c> {1700000000 + i} +0000")
        stream.append(f"data {len(message)}\n{message}")
        stream += [f"{'from' if n == 0 else 'merge'} :{p + 1}" for n, p in enumerate(own)]
        if not own and i:
            raise ValueError("only the first commit may be a root")
        content = text(i)
        stream.append("deleteall")
        if content is not None:
            stream.append(f"M 100644 inline attn.py\ndata {len(content.encode())}\n{content}")
        stream.append("")
    marks = path / ".git" / "marks"
    done = subprocess.run(
        ["git", "fast-import", "--quiet", "--force", f"--export-marks={marks}"], cwd=path, input="\n".join(stream).encode(),
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    named = {int(line.split()[0][1:]) - 1: line.split()[1] for line in marks.read_text().splitlines()}
    git(path, "reset", "--quiet", "--hard", "main")
    return Made(path, tuple(named[i] for i in range(len(parents))), tuple(parents))


def planted(path: Path, parents: Sequence[tuple[int, ...]], culprit: int, broken: Collection[int] = ()) -> Made:
    """Create a repository in which one commit misaligns the causal mask, and some commits cannot be imported."""
    wrong = descendants(parents, culprit)
    return make(path, parents, lambda i: BROKEN if i in broken else source(i, i in wrong))


def git(path: Path, *args: str) -> str:
    """Run git and return its output."""
    return subprocess.run(["git", *args], cwd=path, check=True, capture_output=True, text=True).stdout
