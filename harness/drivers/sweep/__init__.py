"""A command over axes: `spec` reads the request, `cells` makes the command lines, `run` runs them and collects results."""
