"""The kernel contract in pure PyTorch: calls, kernels, oracles, hypotheses, faults and the op-level matrix. Imports no engine."""
