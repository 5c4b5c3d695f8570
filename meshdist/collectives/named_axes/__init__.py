"""JAX's verbs, which name an axis: the public functions of ``meshdist.lax``."""
