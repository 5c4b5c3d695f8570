"""The mesh: named axes over the ranks of a world, and the algebra of their layouts."""
