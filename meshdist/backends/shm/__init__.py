"""The shared-memory backend: the ranks of one host, through memory that they share."""
