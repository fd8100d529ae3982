"""What the server of each arm really served, beside that of its base: its features may differ, and nothing else that counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from assay.harness.engines.sglang.features import Feature
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder
from assay.harness.fingerprint.differences import FingerprintDiff, compare_fingerprints
from assay.harness.text import counted
from assay.harness.verdict import Check, Requirement

_SAME = Requirement(
    "same-servers",
    "the arms' servers differed in their features and in nothing else",
    "the arms' servers did not differ in their features alone",
)
_SIZES = "arguments.cuda_graph_config"
"""The sizes of CUDA graphs follow chunks and drafts; whether there were any is shown by the passes that they served."""


def other_than_features(
    folder: InvarianceFolder, arms: Iterable[tuple[ArmRecord, ArmRecord]], known: Mapping[str, Feature]
) -> tuple[Check, dict[int, str]]:
    """Compare the fingerprints of the servers in which arms ran with those of their bases.

    Settings that a feature is switched with declare what they let differ; features say what an engine resolves besides.

    Args:
        folder: the folder.
        arms: each arm that was run to its end, and its base.
        known: features by id.

    Returns:
        The check, and in words what else differs or was not observed, by number of the arm.

    Raises:
        EvidenceError: a fingerprint is damaged, or of another run.
    """
    fingerprint = cache(folder.fingerprint)
    says: dict[int, str] = {}
    parts: set[str] = set()
    servers: set[int] = set()
    for record, base in arms:
        servers |= {record.server, base.server}
        served, beside = fingerprint(record.server), fingerprint(base.server)
        if served is None or beside is None:
            says[record.number] = "what its server served was not observed"
        elif record.server != base.server:
            diff = compare_fingerprints(beside, served, _declared(record.features, known))
            parts |= set(diff.compared)
            if not diff.compared:
                says[record.number] = "no part of what its server served was observed of both"
            elif diff.undeclared:
                says[record.number] = f"of what its server served (A its base's, B its own), {_sentences(diff)}"
    if says:
        first = next(iter(says.values()))
        said = f"{first}; {counted(len(says), 'arm')} in all"
        return _SAME.check(
            "missing", said, "see assay fingerprint diff of both servers' folders, and run it again"
        ), says
    agree = f"what {counted(len(servers), 'server')} served agrees in {counted(len(parts), 'part')}"
    return _SAME.check("ok", agree if parts else "every arm ran in the server of its base"), says


def _declared(features: Sequence[str], known: Mapping[str, Feature]) -> list[str]:
    """Return what may differ beside the settings with which features are switched, as ``--allow`` names it."""
    resolved = [f"arguments.{name}" for id_ in features for name in known[id_].resolved]
    return [_SIZES, *resolved, *(name for id_ in features for name in known[id_].declares)]


def _sentences(diff: FingerprintDiff) -> str:
    return "; ".join(difference.says for difference in diff.undeclared)
