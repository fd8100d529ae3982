"""Text that no other reader knows: logs of other engines, output of benchmarks and evaluations, one's own notes of a run."""
