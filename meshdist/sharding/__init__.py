"""Shard arrays over a mesh, and plan and run the communication that moves them."""
