"""The read-out: infers the operator that a kernel computes from its answers to probes."""
