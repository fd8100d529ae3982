"""The files of a run: manifest, items and answers, counters, errors of the shadow, traces, logits, packs, timings."""
