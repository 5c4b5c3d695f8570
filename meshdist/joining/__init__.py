"""Ranks without data."""
