"""Plans of ``torch.distributed.checkpoint`` that leave out padding: files hold what every layout has.

Both planners are told ``rows``: for each tensor whose first dimension has padding at its end, the rows before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem


class UnpaddedSavePlanner(DefaultSavePlanner):
    """Has of every tensor the rows before its padding written."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = (self._without_padding(item) for item in plan.items)
        self.plan = replace(plan, items=[item for item in items if item is not None])
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - the name of the base class
        found = super().transform_object(write_item, object)
        if write_item.index.fqn not in self._rows or write_item.tensor_data is None:
            return found
        assert isinstance(found, Tensor)
        return found[: write_item.tensor_data.chunk.sizes[0]]

    def _without_padding(self, item: WriteItem) -> WriteItem | None:
        """Return the item for what its chunk has before the padding; ``None`` where that is nothing."""
        rows, data = self._rows.get(item.index.fqn), item.tensor_data
        if rows is None or data is None:
            return item
        own = min(rows - data.chunk.offsets[0], data.chunk.sizes[0])
        if own <= 0:
            return None
        chunk = replace(data.chunk, sizes=torch.Size((own, *data.chunk.sizes[1:])))
        return replace(item, tensor_data=replace(data, chunk=chunk, size=torch.Size((rows, *data.size[1:]))))


class UnpaddedLoadPlanner(DefaultLoadPlanner):
    """Leaves the padding of tensors as it is."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        self._rows = rows

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None:
            held = dict(metadata.state_dict_metadata)
            for name in self._rows.keys() & held.keys() & state_dict.keys():
                # As large as the tensor here, so that the base class takes both for one; no file has the rest.
                entry = held[name]
                assert isinstance(entry, TensorStorageMetadata)
                held[name] = replace(entry, size=state_dict[name].shape)
            metadata = replace(metadata, state_dict_metadata=held)
        super().set_up_planner(state_dict, metadata, is_coordinator)
