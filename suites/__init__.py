"""Claims about a candidate, one test per claim: ``pytest suites --reference torch_native --candidate sage_attn``."""
