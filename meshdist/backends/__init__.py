"""Move bytes between ranks: one folder per backend, one interface for all."""
