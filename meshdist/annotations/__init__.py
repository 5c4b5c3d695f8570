"""The facts that a tensor carries over mesh axes: its type, its spec, the wrapper that reduces it."""
