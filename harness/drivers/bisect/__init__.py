"""Bisecting: the layers that need the reference, the differences that break a candidate, and probes of commits for git."""

from typing import Literal

SCHEMA: Literal["assay.bisect/7"] = "assay.bisect/7"
