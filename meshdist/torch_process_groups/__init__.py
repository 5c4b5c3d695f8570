"""Our backends as process groups of torch; ``import meshdist.torch_backends`` offers them."""
