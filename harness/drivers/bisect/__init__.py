"""Bisecting: the layers that need the reference, and the commit that broke a kernel."""
