"""The shared-memory wire: the ranks of one host, through memory that they share."""
