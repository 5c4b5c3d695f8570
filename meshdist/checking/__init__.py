"""Calls as they are noted, compared between members, and reported."""
