"""The part that runs inside the process of a server under test: plugin, served kernels, shadow, substitution and trace.

And how that process is controlled from outside: `control`, which imports neither torch nor SGLang.
"""
