"""The certificate: which seeded faults the harness catches, names and pins, and what it wrongly flags."""
