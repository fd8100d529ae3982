"""What assay knows of vLLM: its CPU attention as kernels. It starts no vLLM server."""
