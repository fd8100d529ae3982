"""The features of a run's candidate that its policy names: they are switched in servers of its own, one at a time.

They are started once the run has stopped its own servers, without what the layer diff adds to those.
"""

from __future__ import annotations

import shutil

from assay.harness.collect.plan import Plan, prepare
from assay.harness.collect.run_folder import recorded
from assay.harness.errors import UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.invariance import InvarianceFolder, invariance_folder
from assay.harness.invariance.drive import InvarianceSession
from assay.harness.invariance.invariance_plan import InvariancePlan, compared_spec, gpu_count, plan_invariance
from assay.harness.progress import ProgressDisplay


def plan_features(plan: Plan) -> InvariancePlan | None:
    """Check and plan the comparison of the features that a run's policy names; None if it names none.

    Raises:
        UsageError: a feature is unknown or cannot be switched here, or assay does not start the candidate.
    """
    spec = plan.spec
    if not spec.policy.invariance:
        return None
    if plan.candidate.is_url:
        raise UsageError(
            f"--invariance: the candidate is the URL {plan.candidate}.",
            "a candidate that assay starts, since features are switched where a server starts",
            "name its backend, or leave --invariance out",
        )
    alone = compared_spec(spec.changed(reference=spec.candidate))
    return plan_invariance(prepare(alone), spec.policy.invariance, gpus=gpu_count(spec.device), flag="--invariance")


def switch_features(plan: InvariancePlan | None, folder: RunFolder, display: ProgressDisplay) -> None:
    """Switch the candidate's features, unless the run has failed or it was done. What ends it early is recorded, not raised.

    An interrupted comparison starts over: its base was scored by another server.

    Args:
        plan: what is compared; None if nothing is.
        folder: the run's folder.
        display: shows the progress.

    Raises:
        KeyboardInterrupt: after the server was stopped and the interruption was recorded.
    """
    compared = invariance_folder(folder)
    if plan is None or folder.progress().failure or compared.complete:
        return
    with recorded(folder):
        shutil.rmtree(compared.path, ignore_errors=True)
        display.say(f"Features of {plan.run.reference} that must change nothing: {', '.join(plan.asked)}.")
        InvarianceSession(plan, InvarianceFolder.new(compared.path, folder.nonce), display).run()
