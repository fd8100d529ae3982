"""Everything specific to SGLang: how a server is launched and fails, the plugin inside it, and its backends as kernels."""
