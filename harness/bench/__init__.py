"""The latency suite: both servers timed side by side, and a verdict on the ratio of their times."""
