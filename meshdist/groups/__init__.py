"""Groups: ordered sets of ranks that communicate, and what goes wrong between them."""
