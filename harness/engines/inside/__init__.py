"""The part that runs inside the process of a server under test: plugin, served kernels, shadow, substitution and trace.

It also holds the control of that process from outside: `control`, which imports neither torch nor SGLang.
"""
