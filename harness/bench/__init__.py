"""The latency suite: both servers are timed side by side, and the ratio of their times decides."""
