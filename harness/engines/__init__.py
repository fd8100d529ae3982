"""Start, monitor, query and stop a server under test."""
