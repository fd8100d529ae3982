"""Collecting: what a run asks of its servers, until the evidence of every suite is on disk."""
