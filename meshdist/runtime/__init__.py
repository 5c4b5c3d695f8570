"""Who am I, who are the others: the world, its store, and what starts it."""
