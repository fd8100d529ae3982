"""Numbers -> floors, intervals and tests; `ratio` also decides, for judge and offline alike. Pure functions."""
