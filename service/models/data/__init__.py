"""Data sets, and the order in which a training run visits them.

Everything is a pure function of the spec and the seed, so that every layout and every resumed run sees the
same samples at the same step. Nothing is downloaded.
"""

from service.models.data.checked import check_again, digest_of_labels, load, may_ignore, without_ignored
from service.models.data.order import BatchOrder, open_feed
from service.models.data.sources import Dataset, Loader, Samples, Split

__all__ = [
    "BatchOrder",
    "Dataset",
    "Loader",
    "Samples",
    "Split",
    "check_again",
    "digest_of_labels",
    "load",
    "may_ignore",
    "open_feed",
    "without_ignored",
]
