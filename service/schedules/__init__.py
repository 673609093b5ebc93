"""Pipeline schedules as plain data: written, checked and priced without torch, so that a submit can do it too."""

from service.schedules.forward_only import forward_only
from service.schedules.gpipe import gpipe
from service.schedules.interleaved import interleaved
from service.schedules.one_f_one_b import one_f_one_b
from service.schedules.schedule import Generator
from service.schedules.zbv import zbv
from service.schedules.zero_bubble import zero_bubble

GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
}


def generator(name: str) -> Generator:
    """The schedule of that name, as a function of ``(pp, virtual_stages, micro_batches)``."""
    if name not in GENERATORS:
        raise ValueError(f"no schedule {name!r}; expected one of {', '.join(GENERATORS)}")
    return GENERATORS[name]


__all__ = ["GENERATORS", "Generator", "forward_only", "generator"]
