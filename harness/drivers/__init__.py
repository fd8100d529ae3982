"""Loops over comparisons: bisections and sweeps choose sides and stop; they ask and judge nothing themselves."""
