"""Floors, intervals and tests, computed from numbers; `ratio` also decides, for judge and offline alike. Pure functions."""
