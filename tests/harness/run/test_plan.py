from __future__ import annotations

import pytest

from assay.harness import extras
from assay.harness.config import RunSpec
from assay.harness.errors import UsageError
from assay.harness.run.plan import prepare


def test_packages_that_only_the_report_needs_are_missed_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_installed", lambda name: name != "junitparser")
    with pytest.raises(UsageError, match="not installed: junitparser"):
        prepare(RunSpec.of(reference="torch_native", candidate="torch_native"))
