from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.certify.kernel import CertifiedKernel
from assay.harness.certify.server_level import ServerLevel, _examine, certified_spec
from assay.harness.progress import ProgressDisplay

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_one_pair_of_servers_sees_one_fault_after_the_other(tmp_path: Path) -> None:
    kernel = CertifiedKernel()
    spec = certified_spec("cpu", "tiny", kernel)
    with ServerLevel(spec, tmp_path / "run", ProgressDisplay(Console(quiet=True)), kernel) as level:
        found = {id: _examine(CATALOGUE[id], level) for id in ("mask-top-left", "identity", "layer-2-zero", "gain-0.1-percent")}
    assert {id: one.outcome for id, one in found.items()} == {
        "mask-top-left": "caught", "identity": "quiet", "layer-2-zero": "caught", "gain-0.1-percent": "caught",
    }  # fmt: skip
    assert {look.suite for look in found["mask-top-left"].looks if look.caught} == {"layers", "logits", "greedy", "accuracy"}
    assert {look.suite for look in found["gain-0.1-percent"].looks if look.caught} == {"layers"}
    assert found["layer-2-zero"].where.startswith("extend and decode, layer 2 of 4")
    assert {id: one.named for id, one in found.items()} == {
        "mask-top-left": True, "identity": None, "layer-2-zero": None, "gain-0.1-percent": None,
    }  # fmt: skip
    assert "mask-top-left" in found["mask-top-left"].findings
    assert all(found[id].pinned for id in ("mask-top-left", "layer-2-zero"))
