"""``pytest suites --reference … --candidate …``: see `assay.suites.fixtures`."""

from __future__ import annotations

pytest_plugins = ["assay.suites.fixtures"]
