"""Defines the rows of ``benchmarks/train.py``: layouts of one model, and the peer's figures on the same machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SEQUENCE, PER_GPU = 4096, 4
"""Tokens per sequence, and sequences per GPU and optimizer step in every layout."""

MODEL: dict[str, Any] = {
    "family": "transformer",
    "vocab_size": 32_768,
    "dim": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "ffn_dim": 8192,
    "max_sequence": SEQUENCE,
    "rope_theta": 500_000.0,
}
SMOKE_SEQUENCE = 16
SMOKE_MODEL = MODEL | {"vocab_size": 64, "dim": 32, "layers": 8, "heads": 4, "kv_heads": 4, "ffn_dim": 64}


@dataclass(frozen=True)
class Peer:
    """Tokens per second and GPU, and peak reserved GiB."""

    tokens_per_s: float
    gib: float


PEER_NAME = "torchtitan v0.2.2"
PEERS = {
    "fsdp1": Peer(62_527, 23.3),
    "fsdp4": Peer(61_060, 14.2),
    "fsdp4-eager": Peer(56_019, 20.2),
    "tp2xfsdp2": Peer(52_774, 18.3),
    "tp2xfsdp2-eager": Peer(43_672, 25.2),
    "tp4": Peer(44_692, 15.9),
    "pp2xfsdp2-1f1b": Peer(50_301, 10.0),
    "pp2xfsdp2-1f1b-eager": Peer(44_258, 11.2),
    "pp2xfsdp2-interleaved": Peer(50_716, 11.2),
    "pp2xfsdp2-interleaved-eager": Peer(51_484, 15.7),
    "pp2xfsdp2-zbv-eager": Peer(49_348, 17.0),
    "pp4-1f1b": Peer(48_564, 5.0),
    "pp4-interleaved": Peer(46_840, 6.9),
    "fsdp1-float8": Peer(71_828, 27.2),
    "fsdp4-float8": Peer(70_712, 18.6),
}
"""Measured on 4 × NVIDIA H200 (NVLink), torch 2.11.0+cu130: selective per-operator activation checkpointing (none in
the eager interleaved and ZBV rows), float32 optimizer state but for tp4 and pp4, 25 steps, median after step 10.
"""


@dataclass(frozen=True)
class Row:
    """A layout and how it is run. ``micro`` is sequences per forward; ``bf16_state`` as the peer's row has it."""

    name: str
    parallel: dict[str, int]
    compiled: bool = True
    schedule: str = "1f1b"
    micro: int = 1
    checkpoint: str = "none"
    reduce: str = "last"
    reshard: str = "auto"
    float8: bool = False
    bf16_state: bool = False
    peer: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        product = 1
        for degree in self.parallel.values():
            product *= degree
        return product

    def spec(self, *, smoke: bool, steps: int) -> dict[str, Any]:
        """The training job's spec."""
        return {
            "model": SMOKE_MODEL if smoke else MODEL,
            "data": {"source": "tokens"},
            "steps": steps,
            "batch": {"global": PER_GPU * self.gpus, "micro": self.micro},
            "parallel": self.parallel,
            "precision": self.precision(smoke=smoke),
            "optimizer": {"lr": 3e-4, "weight_decay": 0.1, "clip_norm": 1.0},
            "schedule": {"warmup": 2},
            "activation_checkpoint": self.checkpoint,
            "sharding": {"reduce": self.reduce, "reshard": self.reshard},
            "pipeline": {"schedule": self.schedule},
            **self.settings,
        }

    def backend(self, *, smoke: bool) -> str:
        return "aot_eager" if smoke else "inductor"

    def precision(self, *, smoke: bool) -> dict[str, Any]:
        float8 = {"float8": True} if self.float8 and not smoke else {}
        return {"param": "fp32" if self.bf16_state else "bf16", "reduce": "fp32", **float8}


def _eager(row: Row, **changes: Any) -> Row:
    return replace(row, name=f"{row.name}-eager", compiled=False, **changes)


def _pipeline(pp: int, schedule: str, **changes: Any) -> Row:
    parallel = {"pp": pp, "dp_shard": 4 // pp} if pp < 4 else {"pp": pp}
    name = f"pp{pp}xfsdp{4 // pp}-{schedule}" if pp < 4 else f"pp{pp}-{schedule}"
    return Row(name, parallel, schedule=schedule, bf16_state=pp == 4, **changes)


FSDP1 = Row("fsdp1", {"dp_shard": 1})
FSDP2 = Row("fsdp2", {"dp_shard": 2})
FSDP4 = Row("fsdp4", {"dp_shard": 4})
TP2 = Row("tp2xfsdp2", {"dp_shard": 2, "tp": 2}, micro=4)
TP4 = Row("tp4", {"tp": 4}, micro=4, bf16_state=True)
ROWS = {
    row.name: row
    for row in (
        FSDP1,
        _eager(FSDP1),
        replace(FSDP1, name="fsdp1-float8", float8=True, micro=4),
        FSDP2,
        replace(FSDP2, name="fsdp2-float8", float8=True, micro=4),
        Row("tp2", {"tp": 2}, micro=4, bf16_state=True),
        Row("pp2-1f1b", {"pp": 2}, bf16_state=True),
        FSDP4,
        _eager(FSDP4),
        replace(FSDP4, name="fsdp4-float8", float8=True, micro=4),
        TP2,
        _eager(TP2, micro=2),
        TP4,
        _eager(TP4),
        _pipeline(2, "1f1b"),
        _eager(_pipeline(2, "1f1b"), checkpoint="selective"),
        _pipeline(2, "interleaved"),
        _eager(_pipeline(2, "interleaved")),
        _pipeline(2, "zero_bubble"),
        _eager(_pipeline(2, "zero_bubble")),
        _pipeline(2, "zbv"),
        _eager(_pipeline(2, "zbv")),
        _pipeline(4, "1f1b", checkpoint="selective"),
        _eager(_pipeline(4, "1f1b", checkpoint="selective")),
        _pipeline(4, "interleaved", checkpoint="selective"),
        _eager(_pipeline(4, "interleaved", checkpoint="selective")),
    )
}


VARIABLE = ("micro", "checkpoint", "schedule", "reduce", "reshard")


def varied(text: str) -> Row:
    """``ROW:field=value,…`` as a row of its own, with the peer of the row that it varies."""
    name, _, changes = text.partition(":")
    row, values = ROWS[name], {}
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        if key not in VARIABLE:
            raise ValueError(f"{text}: {key!r} cannot be varied; expected one of {', '.join(VARIABLE)}")
        values[key] = int(value) if key == "micro" else value
    return replace(row, **values, name=text, peer=name) if values else row
