"""The op-level matrix as part of a run: the candidate's kernel outside of a server, on calls of the shape of the run's model.

A server sees the conditions that an engine makes; the matrix has all pairs of lengths, batches, data and page sizes up to the
policy's envelope, on synthetic data, with float64 as the truth.
"""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.engines.model import ModelShape, model_shape
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_jobs import MatrixJob
from assay.harness.evidence.op_matrix import MATRIX, MatrixRecord
from assay.harness.progress import ProgressDisplay

_DTYPES = ("float16", "bfloat16", "float32")


def matrix_job(plan: Plan, folder: RunFolder) -> MatrixJob | None:
    """The matrix that is still to be run; None if that is done, or if the candidate is no kernel of the contract."""
    if not plan.candidate.is_kernel or not plan.has_layer_diff or folder.read(MATRIX) is not None:
        return None
    return job_of(plan, folder)


def job_of(plan: Plan, folder: RunFolder) -> MatrixJob:
    """The matrix of a run's candidate: of the shape of the run's model, up to the policy's envelope."""
    model = model_shape(plan.model)
    dtype = _dtype(folder, plan.spec.device, model)
    tokens = min(plan.spec.policy.envelope_tokens, model.context)
    heads = f"{model.q_heads} q heads on {model.kv_heads} kv heads"
    return MatrixJob(
        record=MatrixRecord(
            kernel=plan.candidate.name, calls=f"{dtype}, head_dim {model.head_dim}, {heads}, to {tokens:,} tokens"
        ),
        device=plan.spec.device,
        dtype=dtype,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        tokens=tokens,
    )


def impossible(job: MatrixJob) -> str:
    """Why a matrix cannot be made; empty if it can."""
    known = job.q_heads and job.kv_heads and job.head_dim
    return "" if known else "the model's configuration does not state how many heads it has"


def keep_matrix(folder: RunFolder, record: MatrixRecord, display: ProgressDisplay) -> None:
    """Write the result, and show it.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    folder.write(MATRIX, record)
    if record.error:
        display.say(f"Op-level matrix: not tested: {record.error}.")
        return
    named = "; ".join(finding.title for finding in record.findings) or "nothing"
    display.say(f"Op-level matrix: {len(record.computed)} calls in {record.seconds:.1f} s: found {named}.")


def _dtype(folder: RunFolder, device: str, model: ModelShape) -> str:
    """The dtype in which the candidate's server computed; by default float32 on the CPU, else the model's."""
    servers = {server.role: server for server in folder.progress().servers}
    served = [str(servers[role].arguments.get("dtype", "")) for role in ("candidate", "reference") if role in servers]
    usual = "float32" if device == "cpu" else model.dtype if model.dtype in _DTYPES else "bfloat16"
    return next((name for name in served if name in _DTYPES), usual)
