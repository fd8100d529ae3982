"""Everything specific to vLLM: its CPU attention as kernels. It starts no vLLM server."""
