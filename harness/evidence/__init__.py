"""The files of a run: manifest, items and answers, counters, shadow errors, traces, logits, packs, timings."""
