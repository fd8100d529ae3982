"""A page for each hypothesis and finding: its picture, wrong and right code, public reports, the command that shows it."""
