"""Sweeps: axes -> cells, each of which is a command of assay, and the executors that run them on this machine or on Ray."""
