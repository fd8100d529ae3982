"""Results that last: rows of runs and cells in Parquet files, which DuckDB reads, and what a number did over commits and dates."""
