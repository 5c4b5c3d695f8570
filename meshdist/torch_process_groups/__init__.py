"""Torch process groups on meshdist backends; see ``meshdist.torch_backends``."""
