"""Tensor parallelism: layers whose parameters are divided over the ``tp`` dimension of the mesh."""

from service.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from service.parallel.tensor.placement import distribute, local, local_copy
from service.parallel.tensor.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
    "distribute",
    "local",
    "local_copy",
    "vocabulary_parallel_cross_entropy",
]
