"""The mesh: named axes over the ranks of a world, and the groups derived from them."""
