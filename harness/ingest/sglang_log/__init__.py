"""Logs of SGLang servers, and of pytest runs that start them."""
