"""Arrange the ranks of a world along named axes."""
