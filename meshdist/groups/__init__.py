"""Groups: ordered sets of ranks that communicate, and the diagnosis of their failures."""
