"""Benchmark collectives of meshdist and other libraries, interleaved in one run."""
