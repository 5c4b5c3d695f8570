"""Worlds: how programs begin and end, as processes or as simulated ranks."""
