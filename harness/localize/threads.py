"""How many threads PyTorch uses on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from assay.harness.attention.call import AttentionCall

SMALL_SCORES = 2**22
"""Attention scores (queries x keys x heads) of a call up to which threads cost more than they gain."""


@contextmanager
def few_threads(calls: Sequence[AttentionCall]) -> Iterator[None]:
    """Run PyTorch on one thread where all calls are small and on a CPU.

    Two threads wait for each other in every operation: on two busy cores, checking a kernel on the small matrix took 15 s of CPU
    with two, 0.8 s with one. Set ``OMP_NUM_THREADS`` to keep the threads, for a CPU kernel whose own threads might race.
    """
    before = torch.get_num_threads()
    small = all(
        call.q.device.type == "cpu" and call.q.shape[0] * call.q.shape[1] * call.k.shape[0] <= SMALL_SCORES
        for call in calls
    )
    if not small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
