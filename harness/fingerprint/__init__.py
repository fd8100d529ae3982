"""Fingerprints of what a server really serves: cos and sin, weights and token ids, as numbers that can be compared."""
