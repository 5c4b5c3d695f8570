"""Tools to find out what a parallel program does."""
