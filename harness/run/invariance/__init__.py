"""Features that should not affect outputs: toggle each, alone and in pairs, and score the same tokens every time."""
