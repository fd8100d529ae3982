"""A command over axes: `spec` reads what is asked, `cells` makes the command lines, `run` runs them, `result` is what is left."""
