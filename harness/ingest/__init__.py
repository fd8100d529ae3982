"""Other people's logs, results, traces and dumps → facts, findings and a verdict. Nothing in a file is ever run."""
