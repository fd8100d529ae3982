"""Bisecting: the layers that need the reference, the differences that break a candidate, and the commit that broke a kernel."""

from typing import Literal

SCHEMA: Literal["assay.bisect/7"] = "assay.bisect/7"
