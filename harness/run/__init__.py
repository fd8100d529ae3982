"""A run: plan, start, ask, resume, stop. It turns a spec into the evidence of every suite, on disk."""
