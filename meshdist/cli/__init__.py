"""The command line: one file for each sub-command, started without importing torch."""
