"""Arrays that lie on a mesh in shards: plans of the communication, which need no processes."""
