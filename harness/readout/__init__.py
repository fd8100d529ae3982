"""The read-out: the operator that a kernel was observed to compute, read by asking it."""
