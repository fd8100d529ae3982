"""Reads other tools' logs, results, traces and dumps, and derives facts, findings and a verdict from them.

Reading starts no server and runs no code from a file.
"""
