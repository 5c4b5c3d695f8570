"""The ways to move bytes: one folder a wire, one protocol for all."""
