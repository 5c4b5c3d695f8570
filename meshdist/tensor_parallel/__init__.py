"""Tensor-parallel layers, their loss, and a description of their communication.

``md.parallelize`` converts the layers of a model to these layers, and ``apply`` initializes them.
"""

from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .losses import cross_entropy
from .parallelize import explain
from .whole_layers import apply

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "apply",
    "cross_entropy",
    "explain",
]


def __dir__() -> list[str]:
    return __all__
