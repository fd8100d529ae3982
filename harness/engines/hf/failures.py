"""Causes of failures that only transformers' logs name: none, as `assay.harness.engines.failures` has those of loading a model."""

from __future__ import annotations

from assay.harness.engines.failures import Cause

CAUSES: tuple[Cause, ...] = ()
