"""Known bugs of attention kernels, one record each, and the faults that are seeded of them."""
