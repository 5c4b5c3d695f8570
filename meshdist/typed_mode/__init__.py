"""Infer the types of values over mesh axes."""
