"""Tensor parallelism: layers whose parameters are divided over the ``tp`` dimension of the mesh."""

from service.parallel.tensor.linear import ColumnParallelLinear, OnEveryRank, RowParallelLinear, WholeLinear, joint
from service.parallel.tensor.placement import distribute, local
from service.parallel.tensor.residual_stream import Replicated, ResidualStream, SequenceSharded
from service.parallel.tensor.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    cross_entropy,
    localize_ids,
    vocabulary_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "OnEveryRank",
    "Replicated",
    "ResidualStream",
    "RowParallelLinear",
    "SequenceSharded",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "WholeLinear",
    "cross_entropy",
    "distribute",
    "joint",
    "local",
    "localize_ids",
    "vocabulary_parallel_cross_entropy",
]
