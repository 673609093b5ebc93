"""Reports a run that does not reach the speed of whole graphs: it still compiles when every input shape has been seen,
or breaks a graph although the spec says ``fullgraph``.
"""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.evidence import Recompile
from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    if observation.must_be_whole:
        for broken in observation.evidence.graph_breaks:
            yield Finding("fail_break", f"fullgraph: {broken}")
    graphs = observation.evidence.cuda_graphs
    if graphs is not None and graphs.late:
        again = "".join(f": {each.reason} ({each.count}×)" for each in graphs.rerecords[:1])
        where = f"in {len(graphs.late)} iterations from {graphs.late[0]} on"
        yield Finding("unstable", f"still recording CUDA graphs after warm-up, {where}{again}")
    late = observation.evidence.late
    if not late:
        return
    cause = _cause(observation.evidence.recompiles, late)
    yield Finding("unstable", f"still compiling after warm-up, in {len(late)} iterations from {late[0]} on{cause}")


def _cause(recompiles: tuple[Recompile, ...], late: tuple[int, ...]) -> str:
    found = next((recompile for recompile in recompiles if recompile.iteration in late), None)
    return f": {found.guard} ({found.function}, {found.file}:{found.line})" if found else ""
