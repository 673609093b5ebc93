"""Writing a rank's shards for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from service.jobs.atomic import flush

SHARDING, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
"""Keys of a file's metadata where torch's reader looks for the place of each shard in its tensor."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what torch's writer with ``save_distributed`` writes, without a copy of the whole file in memory: a third
    of the time. Every rank has one file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        tensors = {item.index.fqn: _alone(planner.resolve_data(item)) for item in plan.items}
        if plan.items:
            self._write(plan, tensors)
        written.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return written

    def _write(self, plan: SavePlan, tensors: dict[str, Tensor]) -> None:
        places = {item.index.fqn: {"saved_offsets": list(_chunk(item).offsets)} for item in plan.items}
        path = self._folder / f"shard-{plan.storage_data['shard_index']:05}.safetensors"
        save_file(tensors, path, metadata={SHARDING: json.dumps(places), VERSION: "1.0", "format": "pt"})
        flush(path)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    return item.tensor_data.chunk


def _alone(tensor: Tensor | BytesIO) -> Tensor:
    """Return the tensor on the CPU, without the rest of a storage that it is a part of."""
    if isinstance(tensor, BytesIO):
        raise TypeError("a checkpoint holds tensors only")
    own = tensor.detach().cpu()
    return own if own.untyped_storage().nbytes() == own.nbytes and own.is_contiguous() else own.clone().contiguous()
