"""Work that needs no server: check a kernel on the op-level matrix, replay recorded calls, time them."""
