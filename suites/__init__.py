"""Claims about a candidate, one per test: ``pytest suites --reference torch_native --candidate sage_attn``."""
