"""The features of a run's candidate that its policy names: they are switched in servers of its own, one at a time.

They are started once the run has stopped its own servers, without what the layer diff adds to those.
"""

from __future__ import annotations

from assay.harness.errors import UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.invariance import InvarianceFolder, invariance_folder
from assay.harness.progress import ProgressDisplay
from assay.harness.run.invariance.drive import InvarianceSession
from assay.harness.run.invariance.invariance_plan import InvariancePlan, compared_spec, gpu_count, plan_invariance
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import make_part


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
    """Switch the candidate's features, as a part of a run: see `make_part`.

    Args:
        plan: what is compared; None if nothing is.
        folder: the run's folder.
        display: shows the progress.
    """
    if plan is None:
        return

    def switch(empty: InvarianceFolder) -> None:
        display.say(f"Features of {plan.run.reference} that must change nothing: {', '.join(plan.asked)}.")
        InvarianceSession(plan, empty, display).run()

    make_part(folder, invariance_folder(folder), switch)
