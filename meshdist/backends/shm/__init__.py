"""Run on shared memory, among the ranks of one host."""
