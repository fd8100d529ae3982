"""The model of a server of transformers, without the server: it prints the fingerprint as JSON on the last line of its output."""

from __future__ import annotations

from assay.harness.engines.hf.process import parsed, served

if __name__ == "__main__":
    print("\n" + served(parsed()).describe().model_dump_json(), flush=True)
