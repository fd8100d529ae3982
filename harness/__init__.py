"""The instrument: spec -> engines -> evidence -> compare -> stats -> localize -> gate.

A lower room never imports a higher one. ``attention``, ``evidence``, ``compare`` and ``stats`` are the ground floor.
"""
