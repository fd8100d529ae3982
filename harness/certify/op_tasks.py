"""The examinations at the op level, and their envelope."""

from __future__ import annotations

from collections.abc import Collection

import torch

from assay.harness.attention.call import Kernel
from assay.harness.attention.noise import FAMILIES
from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.certify.op_level import SUITE, Checker, OpLevel, checked, examine_fault, examine_honest, honest
from assay.harness.certify.session import Trial, chosen
from assay.harness.evidence.certificate import CertifiedEnvelope, installed_version, source_hash

HONEST = "honest-"
"""What the ids of honest kernels begin with."""
CANDIDATE = f"{HONEST}candidate"
"""Id of the certified kernel itself, without a fault."""


def op_tasks(level: OpLevel, only: Collection[str] = (), checker: Checker = checked) -> list[Trial]:
    """List the examinations of the certified kernel, of every fault in it, and of an honest kernel of every noise family.

    Args:
        level: the op-level matrix and the certified kernel.
        only: ids to examine; empty for all.
        checker: what is asked what is wrong with a kernel.

    Raises:
        UsageError: there is nothing with one of these ids.
    """
    tasks, kernel = list[Trial](), level.kernel
    if kernel.name:
        tasks.append(_honest(CANDIDATE, f"{kernel.name} without a fault", kernel.kernel, level, checker))
    tasks += [Trial.of(fault, lambda fault: examine_fault(fault, level, checker)) for fault in CATALOGUE.values()]
    for name in FAMILIES:
        words = name or "exact"
        tasks.append(_honest(HONEST + words, f"honest {words} kernel", honest(name, level.seed), level, checker))
    return chosen(tasks, only)


def _honest(id: str, title: str, kernel: Kernel, level: OpLevel, checker: Checker) -> Trial:
    return Trial(id, "honest", title, (), "", lambda: examine_honest(id, title, kernel, level, checker))


def op_envelope(level: OpLevel, read_out: bool = False) -> CertifiedEnvelope:
    """Return the op-level matrix's envelope, as far as the certified kernel computes it; `read_out`: kernels are read."""
    calls, kernel, declared = level.calls, level.kernel, level.kernel.declared
    return CertifiedEnvelope(
        level="op", device=level.device,
        machine=torch.cuda.get_device_name(level.device) if level.device.startswith("cuda") else "",
        candidate=kernel.name, code=kernel.code, phases=declared.phases, noise=declared.noise,
        dtypes=tuple(sorted({str(call.q.dtype).removeprefix("torch.") for call in calls})),
        torch=torch.__version__, calls=len(calls), layers=len({call.layer for call in calls}),
        heads=max(call.q.shape[1] for call in calls), most_new=max(max(call.lens_q) for call in calls),
        longest=max(max(call.lens_k) for call in calls), largest_batch=max(len(call.lens_q) for call in calls),
        seed=level.seed, suites=(SUITE,), read_out=read_out, version=installed_version(), source=source_hash(),
    )  # fmt: skip
