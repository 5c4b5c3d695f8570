"""Collectives that return new tensors, with their derivatives."""
