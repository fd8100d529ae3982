"""The instrument: spec -> collect -> evidence -> compare -> judge -> report.

A lower room never imports a higher one; docs/architecture.md lists the rooms from top to bottom.
"""
