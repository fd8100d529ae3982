"""The third opinion on two servers whose logits differ: transformers scores the same tokens, so that one of the sides is named.

It costs a minute on a CPU, so only a difference that nothing declares asks for it, with a model that loads quickly.
"""

from __future__ import annotations

from assay.harness.engines import memory
from assay.harness.engines.launch import Launch
from assay.harness.engines.launched import server
from assay.harness.errors import AssayError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path, read_logits, write_logits
from assay.harness.evidence.manifest import ROUNDING
from assay.harness.evidence.probes import passes_of
from assay.harness.evidence.run_file import RUN
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.logits_suite import WITNESS, claim
from assay.harness.progress import ProgressDisplay
from assay.harness.run.logit_scoring import score_again
from assay.harness.run.plan import Plan
from assay.harness.run.servers import core_of, record_fingerprint, running
from assay.harness.run.side_probes import traced_tokens
from assay.harness.sides import ROLES, Side

# Bytes of weights up to which the witness is asked.
_MOST_BYTES = 2**30


def ask_witness(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Have transformers score the tokens that both servers scored, if their logits differ and nothing declares why.

    A witness that fails is no failure of the run, which only goes without it.

    Raises:
        EvidenceError: the folder cannot be written, or its evidence is damaged.
    """
    scored = [logits_path(folder.path, role, 0) for role in ROLES]
    declared = folder.read(ROUNDING) is not None or "model" in plan.spec.treatment
    size, place = memory.model_bytes(plan.model), folder.path / WITNESS
    if declared or place.exists() or not size or size > _MOST_BYTES or not all(map(plan.instrumented, ROLES)):
        return
    if not all(path.exists() for path in scored):
        return
    suite = claim(RunEvidence.of(folder)).suite
    if suite is None or suite.verdict == "pass":
        return
    side, device = Side(engine="hf", backend="hf", model=plan.spec.reference.model), plan.spec.device
    witness = server(
        Launch(
            engine=side.engine, role="candidate", backend=side.backend, model=plan.model, device=device, evidence=place,
            log=folder.path / f"{WITNESS}.log", decode_backend="", startup_timeout=plan.spec.startup_timeout,
            request_timeout=plan.spec.request_timeout, cpu_core=core_of(device),
            extra={RUN: folder.nonce},
        )
    )  # fmt: skip
    witness.who = "transformers as the witness"
    display.say("The logits differ: transformers scores the same tokens.")
    try:
        with running([witness], device, display):
            made = score_again(witness, read_logits(scored[0], folder.nonce), folder.nonce, display, "witness: logits")
            record_fingerprint(witness, side, place, folder.nonce)
            write_logits(place, made)
            if (passes := passes_of(folder.server_folder(ROLES[0]), folder.nonce)) and passes[-1].traced:
                witness.send("/trace", {"label": WITNESS, "ids": traced_tokens(plan, passes, passes[-1].traced)})
    except AssayError as error:
        display.say(f"The witness failed: {error.found}", stays=True)
