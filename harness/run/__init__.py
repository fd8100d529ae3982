"""A run: plan, start, ask, resume, stop. A spec becomes the evidence of every suite, on disk."""
