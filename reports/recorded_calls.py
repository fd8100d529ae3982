"""The documents of recorded calls: the contents of a pack, and the result of a replay."""

from __future__ import annotations

import math
from pathlib import Path

from assay.harness.conditions import has_cached_prefix
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.pack import PackManifest, replay_command
from assay.harness.text import one_line, two_digits
from assay.harness.verdict import cause_of
from assay.reports.check import reproducing
from assay.reports.document import Block, Document, Findings, Line, Table


def replay_document(replay: KernelResult) -> Document:
    """Build the document of a replay: what is wrong, on how many of the calls, and why there is no verdict if there is none."""
    cause = cause_of(replay.findings)
    does = one_line(f"{replay.kernel} {cause.does}.", 300) if cause and cause.does else ""
    worst = f"Worst own error: {two_digits(replay.worst)} times its bound"
    ran = (
        f"Replayed {replay.calls} of {replay.recorded} recorded calls, {replay.with_prefix} with a cached prefix, in "
        f"{replay.seconds:.1f} s. {worst if math.isfinite(replay.worst) else 'An output is not finite'}."
    )
    body: list[Block] = [Line(does)] if does else []
    body.append(Line(ran if replay.calls else f"None of {replay.recorded} recorded calls was computed."))
    body += [Line(f"The pack's {phase} calls: {text or 'none'}.") for phase, text in replay.envelope.items()]
    body.append(Findings(replay.findings))
    body += [Line(f"{sentence[0].upper()}{sentence[1:]}.") for sentence in replay.not_tested]
    body += [Line(f"Smallest failing call: {replay.smallest}")] if replay.smallest else []
    headline = {
        "pass": f"{replay.kernel}: every own error is within its bound.",
        "regression": does or f"{replay.kernel} is wrong on recorded calls.",
    }
    return Document(
        command="replay",
        title=replay.kernel,
        verdict=replay.verdict,
        headline=headline.get(replay.verdict, f"{'; '.join(replay.missing)}."),
        body=[*body, *reproducing(replay.test)],
        result=replay,
    )


def pack_document(manifest: PackManifest, pack: Path) -> Document:
    """Build the document of a recorded pack: the calls by phase and cached prefix, and the command that replays them."""
    strata: dict[tuple[str, str], list[tuple[int | None, int]]] = {}
    for call in manifest.calls:
        cached = "yes" if has_cached_prefix(call.prefix) else "no"
        strata.setdefault((call.spec.phase, cached), []).append((call.spec.layer, call.bytes))
    rows = [
        (
            *stratum,
            f"{len(calls)}",
            f"{len({layer for layer, _ in calls})}",
            f"{sum(size for _, size in calls) / 2**20:.1f}",
        )
        for stratum, calls in sorted(strata.items(), reverse=True)
    ]
    too_large = f"; {manifest.too_large} were too large" if manifest.too_large else ""
    return Document(
        command="record",
        title=str(pack),
        verdict=None,
        headline=f"Recorded {len(manifest.calls)} of {manifest.seen:,} calls{too_large}: {pack}",
        body=[
            Table(("phase", "cached prefix", "calls", "layers", "MiB"), rows, numbers=(2, 3, 4)),
            Line(f"Replay: {replay_command(pack)}"),
        ],
        exit_code=0,
        result=manifest,
    )
