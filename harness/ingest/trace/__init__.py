"""Traces of engines and profilers: read, checked against the rules of `steps.RULES`, and compared."""
