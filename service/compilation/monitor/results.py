"""Records the results of compiled calls: which objects still hold them when replays write over them, and which code
reads them afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from service.compilation.instruments.functions import unobserved
from service.compilation.monitor.usage import StaleRead
from service.parallel.boundary import CallSite, HeldResult, Origin
from service.parallel.boundary.holders import holders_of, read_again_of
from service.parallel.boundary.lifetimes import (
    NOWHERE,
    CallResult,
    LiveResults,
    address_of,
    held_by_output,
    local,
    located,
)
from service.parallel.containers import tensors_in

_LOOKED_AT = (2, 3)
"""The replays at whose beginning the last round's results are searched for; a search takes 0.1 s or more."""
_LOOKS = 2
"""How often to search for the holders of one call's results that one line reads."""


class ResultLifetimes:
    """Results by rounds of replays: those of earlier rounds have been written over.

    ``held``: alive a whole round after their own; ``overlapping``: alive when the next began; ``reads``: read since
    then. ``held_over`` counts, by module, those of ``held`` that its calls returned. Gradients of ``trainable`` are
    left out. Without ``looks``, ``overlapping`` stays empty.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], trainable: Mapping[str, Tensor], *, looks: bool = True
    ) -> None:
        self.held: list[HeldResult] = []
        self.overlapping: list[HeldResult] = []
        self.reads: list[StaleRead] = []
        self.held_over = Counter[str]()
        self._trainable = trainable
        self._looks_for_overlapping = looks
        self._names = {id(part): name for name, part in _named_modules(modules)}
        self._rounds = [LiveResults()]
        self._awaited: set[int] = set()
        self._overwritten: dict[int, CallResult] = {}
        self._holders: dict[int, tuple[str, ...]] = {}
        self._tensors: list[tuple[weakref.ref[Tensor], CallResult]] = []
        self._looks = Counter[tuple[str, CallSite, CallSite]]()

    @unobserved
    def note(
        self, origin: Origin, outputs: Iterable[Tensor], aliased: Iterable[Tensor] = (), *, returned: bool = True
    ) -> None:
        """Note that a call returned ``outputs``, or left them elsewhere; those in memory of ``aliased`` are not new."""
        newest = self._rounds[-1]
        known = () if returned else (output.address for output in newest.alive())
        fresh: dict[int, Tensor] = {}
        for tensor in outputs:
            fresh.setdefault(address_of(tensor), tensor)
        for address in (NOWHERE, *known, *map(address_of, aliased)):
            fresh.pop(address, None)
        # A replayed CUDA graph returns the same tensor again: a holder from an earlier round holds the newest
        # result, and the program's numbers show that it is not the one that was kept.
        for address in fresh:
            self._overwritten.pop(address, None)
        for earlier in self._rounds[:-1]:
            earlier.forget(fresh)
        newest.note(origin, fresh.values(), returned=returned)

    @unobserved
    def begin(self, generation: int) -> None:
        """Note that replays begin, which overwrite earlier results."""
        # A loop's variables may hold the newest of the last round's results until they get the next.
        *old, newest = self._rounds
        self._rounds = [newest, LiveResults()]
        gradients = self._gradients()
        late, recent = (
            [output for results in which for output in results.alive() if output.address not in gradients]
            for which in (old, [newest])
        )
        found = self._held_over(late)
        if found:
            gc.collect()  # results that only cycles refer to are unreachable, and cannot be read
            found = self._held_over([output for output in late if output.alive])
        for output, held in found:
            self.held.append(held)
            self.held_over[output.origin.module] += output.returned
        self._awaited = read_again_of({output.address for output in recent})
        self._overwritten |= {output.address: output for output in newest.alive()}
        self._overwritten = {address: each for address, each in self._overwritten.items() if each.alive}
        if self._looks_for_overlapping and generation in _LOOKED_AT:
            self._look(recent)

    def _held_over(self, late: Sequence[CallResult]) -> list[tuple[CallResult, HeldResult]]:
        """Return those with a holder that reads them again, now or when they were overwritten."""
        tensors = located(late)
        awaited = [output for output in late if output.address in self._awaited]
        others = [output for output in late if output.address not in self._awaited]
        return [
            *held_by_output(awaited, _of(awaited, tensors), self._names),
            *held_by_output(others, _of(others, tensors), self._names, read_again=True),
        ]

    def _look(self, outputs: Sequence[CallResult]) -> None:
        tensors = located(outputs)
        found = held_by_output(outputs, tensors, self._names, read_again=True)
        self.overlapping.extend(held for _, held in found)
        self._holders = {output.address: held.holders for output, held in found}
        self._tensors = [(weakref.ref(each), output) for output in outputs for each in tensors[output.address]]

    @unobserved
    def overwritten_in(self, value: Any) -> list[tuple[Tensor, CallResult]]:
        """Return the tensors in ``value`` that are overwritten results."""
        if not self._overwritten:
            return []
        return [(each, output) for each in tensors_in(value) if (output := self._overwritten_at(each)) is not None]

    @unobserved
    def read(
        self, tensor: Tensor, output: CallResult, site: CallSite, iteration: int, ignored: Sequence[Any] = ()
    ) -> None:
        """Note that an overwritten result is read at ``site``; references from ``ignored`` are the reader's own."""
        line = (output.origin.module, output.origin.site, site)
        self._looks[line] += 1
        holders = dict.fromkeys(self._holders.get(output.address, ()))
        if self._looks[line] <= _LOOKS:
            found = holders_of({output.address: [tensor]}, self._names, ignored).get(output.address)
            if not found:  # the reader has made a view of it
                found = next(
                    (held.holders for _, held in held_by_output([output], located([output]), self._names, ignored)), ()
                )
            holders |= dict.fromkeys(found)
        self.reads.append(StaleRead(iteration, site, output.held([tensor], tuple(holders))))

    def _overwritten_at(self, tensor: Tensor) -> CallResult | None:
        try:
            address = address_of(tensor)
        except NotImplementedError:
            return None
        except RuntimeError:  # CUDA graphs have taken its memory away, and say so
            known = [*self._tensors, *((output.tensor, output) for output in self._overwritten.values())]
            return next((output for reference, output in known if reference() is local(tensor)), None)
        output = self._overwritten.get(address)
        return None if output is None or address in self._gradients() else output

    def _gradients(self) -> set[int]:
        """Return the addresses of gradients, which have a detector of their own."""
        found = set()
        for parameter in self._trainable.values():
            if parameter.grad is not None:
                with suppress(RuntimeError):  # one that CUDA graphs have invalidated does not tell
                    found.add(address_of(parameter.grad))
        return found


def _of(outputs: Sequence[CallResult], tensors: Mapping[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    """Return the tensors of these outputs alone."""
    return {output.address: tensors[output.address] for output in outputs}


def _named_modules(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in modules.items():
        yield from ((f"{name}.{path}" if path else name, part) for path, part in module.named_modules())
