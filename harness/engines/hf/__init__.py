"""Transformers as an engine: a model as its own library computes it, in float32, eagerly, one sequence at a time."""
