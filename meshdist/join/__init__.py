"""Train on inputs of unequal length: join contexts and uneven loops."""
