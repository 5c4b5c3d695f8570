"""The ways to move bytes: one folder a backend, one protocol for all."""
