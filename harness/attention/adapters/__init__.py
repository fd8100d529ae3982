"""Functions with a signature of their own as kernels of the contract. Imports none of the packages whose signatures it knows."""
