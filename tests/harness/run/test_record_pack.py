"""A pack recorded on its own, from one real server."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.checks.replay import replay
from assay.harness.config import RunSpec
from assay.harness.errors import UsageError
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import prepare
from assay.harness.run.record_pack import record_pack

SPEC = RunSpec.of(reference="torch_native", candidate="torch_native", suites=("layers",), budget_mb=16)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with ProgressDisplay(Console(file=StringIO())) as display, pytest.raises(UsageError, match="is not empty"):
        record_pack(prepare(SPEC), tmp_path, display)


@pytest.mark.server
@pytest.mark.slow
def test_a_recorded_pack_can_be_replayed(tmp_path: Path) -> None:
    pack = tmp_path / "packs" / "pack"
    with ProgressDisplay(Console(file=StringIO())) as display:
        manifest = record_pack(prepare(SPEC), pack, display)
    assert sum(call.bytes for call in manifest.calls) <= 16 * 2**20
    strata = {(call.spec.layer, call.spec.phase, any(call.prefix)) for call in manifest.calls}
    assert strata == {(layer, *kind) for layer in range(4) for kind in (("extend", False), ("extend", True), ("decode", True))}
    result = replay(pack, "assay.harness.attention.sdpa:torch_sdpa")
    assert (result.findings, result.worst < 1, result.with_prefix > 0) == ((), True, True)
