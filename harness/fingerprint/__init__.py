"""What is really being served: cos and sin, weights and token ids, as numbers that two servers can be compared by."""
