"""The judge: evidence -> checks, suites, findings and the verdict, as one `Report`. The only place that decides."""
