"""Other people's logs, results, traces and dumps → facts, findings and a verdict.

It starts no server and runs no code from a file.
"""
