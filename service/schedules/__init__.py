"""Writes, checks and prices pipeline schedules as plain data, without torch, so that a submission can do it too."""

from service.schedules.forward_only import forward_only
from service.schedules.gpipe import GPIPE
from service.schedules.interleaved import INTERLEAVED
from service.schedules.one_f_one_b import ONE_F_ONE_B, ZERO_BUBBLE
from service.schedules.schedule import Generator
from service.schedules.zbv import ZBV

GENERATORS: dict[str, Generator] = {
    generator.name: generator
    for generator in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED,
        ZERO_BUBBLE,
        ZBV,
    )
}


def generator(name: str) -> Generator:
    """Return the schedule of that name, as a function of ``(pp, virtual_stages, micro_batches)``."""
    if name not in GENERATORS:
        raise ValueError(f"no schedule {name!r}; expected one of {', '.join(GENERATORS)}")
    return GENERATORS[name]


__all__ = ["GENERATORS", "Generator", "forward_only", "generator"]
