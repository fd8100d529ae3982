"""What a run leaves on disk: manifest, items and answers, counters, errors of the shadow, traces, logits, packs, timings."""
