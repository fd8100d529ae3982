"""The op-level matrix as part of a run: the candidate's kernel in assay's own process, on calls of the shape of the run's model.

A server sees the conditions that an engine makes; the matrix has all pairs of lengths, batches, data and page sizes up to the
policy's envelope, on synthetic data, with float64 as the truth.
"""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.engines.model import ModelShape, model_shape
from assay.harness.errors import UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.op_matrix import MatrixRecord, read_matrix, write_matrix
from assay.harness.progress import ProgressDisplay

REPEATED = 6
"""Calls that are repeated, to see whether the kernel is deterministic: each is computed three times more."""
_DTYPES = ("float16", "bfloat16", "float32")


def run_matrix(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Run the candidate's kernel on the matrix and write the result, unless that is done or it is no kernel of the contract.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    if not plan.candidate.is_kernel or not plan.has_layer_diff or read_matrix(folder) is not None:
        return
    model = model_shape(plan.model)
    dtype = _dtype(folder, plan.spec.device, model)
    tokens = min(plan.spec.envelope, model.context)
    heads = f"{model.q_heads} q heads on {model.kv_heads} kv heads"
    record = MatrixRecord(
        kernel=plan.candidate.name, calls=f"{dtype}, head_dim {model.head_dim}, {heads}, to {tokens:,} tokens"
    )
    record = _checked(plan, record, model, dtype, tokens)
    write_matrix(folder, record)
    named = record.error or "; ".join(finding.title for finding in record.findings) or "nothing"
    display.say(f"Op-level matrix: {len(record.computed)} calls in {record.seconds:.1f} s: found {named}.")


def _checked(plan: Plan, record: MatrixRecord, model: ModelShape, dtype: str, tokens: int) -> MatrixRecord:
    """The record with the results."""
    import torch  # which only a layer diff needs

    from assay.harness.attention.matrix import model_cases
    from assay.harness.offline.check import check

    if not (model.q_heads and model.kv_heads and model.head_dim):
        return record.model_copy(update={"error": "the model's configuration does not say how many heads it has"})
    cases = model_cases(
        plan.candidate.phases,
        plan.spec.device,
        getattr(torch, dtype),
        (model.q_heads, model.kv_heads),
        model.head_dim,
        tokens,
    )
    try:
        again = f"assay check {plan.candidate.name} --dtype {dtype} --head-dim {model.head_dim}"
        result = check(plan.candidate.name, cases=cases, device=plan.spec.device, again=again, repeats=REPEATED)
    except UsageError as error:
        return record.model_copy(update={"error": error.found})
    return record.model_copy(
        update={
            "computed": tuple(one.case.name for one in result.computed),
            "failing": tuple(case.name for case in result.failing),
            "refused": tuple(case.name for case, _ in (*result.refused, *result.excluded)),
            "worst": None if result.worst is None else result.worst.ratio,
            "missing": result.missing,
            "findings": result.findings,
            "seconds": result.seconds,
        }
    )


def _dtype(folder: RunFolder, device: str, model: ModelShape) -> str:
    """The dtype in which the candidate's server computed; by default float32 on the CPU, else the model's."""
    servers = {server.role: server for server in folder.progress().servers}
    served = [str(servers[role].arguments.get("dtype", "")) for role in ("candidate", "reference") if role in servers]
    usual = "float32" if device == "cpu" else model.dtype if model.dtype in _DTYPES else "bfloat16"
    return next((name for name in served if name in _DTYPES), usual)
