"""Tensor dumps of other tools → a diff by layer, head and token, replay packs, and what a dump holds."""
