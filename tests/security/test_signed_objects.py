"""Objects between ranks are unpickled only when they come from their own group (B1)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from launching import Torchrun
from sockets import payload

from service.jobs.runtime import rendezvous_folder


def meet_without_secret(folder: str, marker: str) -> dict[str, Any]:
    """Rank 1 has joined the group but speaks plain pickle, as one would who took over a connection."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from service.parallel import distributed as ranks

    rank = int(os.environ["RANK"])
    store = dist.FileStore(f"{folder}/ranks", 2)
    if rank == 0:
        ranks.authenticate_objects(rendezvous_folder.secret(Path(folder)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 1:
        distributed_c10d._object_to_tensor = lambda *_: (
            torch.frombuffer(bytearray(payload(Path(marker))), dtype=torch.uint8),
            torch.LongTensor([len(payload(Path(marker)))]),
        )
        distributed_c10d._tensor_to_object = lambda *_: None
    try:
        dist.all_gather_object([None, None], "mine")
    except ranks.RendezvousError as error:
        return {"refused": str(error)}
    return {"refused": ""}


@pytest.mark.distributed
def test_an_object_without_the_groups_signature_is_not_unpickled(torchrun: Torchrun, tmp_path: Path) -> None:
    folder, marker = rendezvous_folder.make(tmp_path / "rendezvous"), tmp_path / "owned"
    first, _ = torchrun(meet_without_secret, 2, folder=str(folder), marker=str(marker))
    assert "outside this group" in first["refused"]
    assert not marker.exists()


def meet(folder: str) -> list[Any]:
    """Join through the folder, then exchange objects, as ranks under the service do."""
    import torch.distributed as dist

    from service.parallel import distributed

    os.environ[rendezvous_folder.VARIABLE] = folder
    distributed.start("cpu")
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, {"rank": dist.get_rank()})
    chosen = [{"from": dist.get_rank()}]
    dist.broadcast_object_list(chosen, src=1)
    distributed.stop()
    return [*values, *chosen]


@pytest.mark.slow
@pytest.mark.distributed
def test_members_of_a_group_exchange_objects(torchrun: Torchrun, tmp_path: Path) -> None:
    folder = rendezvous_folder.make(tmp_path / "rendezvous")
    assert torchrun(meet, 2, folder=str(folder)) == [[{"rank": 0}, {"rank": 1}, {"from": 1}]] * 2
