"""A `Report`, or the result of another command -> HTML, JSON, JUnit, Markdown, text. Renderers decide nothing."""
