"""The differential accuracy and regression harness for LLM attention backends: the public API."""

__version__ = "0.1.0"
