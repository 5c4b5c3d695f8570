"""Starts processes, watches them, and leaves none behind; imports no torch."""
