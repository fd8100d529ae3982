"""Find the commit that broke a kernel, as ``git bisect`` does, with outcomes that are measured: `bisection` has the calls."""
