"""The ways to move bytes: one wire a file, one protocol for all."""
