"""Command-line interface, with one module per sub-command; starts without importing torch."""
