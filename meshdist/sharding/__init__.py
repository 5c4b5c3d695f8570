"""Arrays that lie on a mesh in shards: the communication from one lie to another, and the arrays."""
