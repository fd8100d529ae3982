"""Runs a kernel without a server: checks it on the op-level matrix, or replays recorded calls."""
