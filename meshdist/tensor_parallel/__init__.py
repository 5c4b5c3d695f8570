"""Layers that are split over an axis, the loss of what they return, and what they send.

``md.parallelize`` makes these layers of a model's own, by a plan.
"""

from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .losses import cross_entropy
from .parallelize import explain

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "cross_entropy",
    "explain",
]


def __dir__() -> list[str]:
    return __all__
