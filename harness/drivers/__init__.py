"""Loops over comparisons: bisections and sweeps choose sides and decide when to stop; other rooms ask and judge."""
