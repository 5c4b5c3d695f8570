"""Collectives that return new tensors, beside their transposes."""
