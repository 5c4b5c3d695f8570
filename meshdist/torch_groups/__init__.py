"""Torch's process groups over our wires; ``import meshdist.torch_backends`` offers them."""
