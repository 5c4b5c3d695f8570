"""What a tensor carries over mesh axes: its type, its spec, and who reduces its gradient."""
