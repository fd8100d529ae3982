"""All that knows SGLang: how a server is launched and fails, the plugin inside of it, and its backends as kernels."""
