"""What runs inside the process of a server under test: the plugin, the served kernels, shadow, substitution and trace."""
