"""A kernel on calls, without a server: check it on the op-level matrix, or replay recorded calls."""
