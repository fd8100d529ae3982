"""Find the commit that broke a kernel, as ``git bisect`` does, from measured outcomes; `bisection` has the entry points."""
