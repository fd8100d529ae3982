"""Features that must change nothing: each is switched, alone and in pairs, and the same tokens are scored every time."""
