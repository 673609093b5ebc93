"""Reports a run in which nothing, or not the main part, was compiled: it agrees with eager because it is eager."""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding

_LEAST_SHARE = 0.01
"""The least share of a step's operators in compiled code: with less, eager is compared with eager."""


def detect(observation: Observation) -> Iterator[Finding]:
    if observation.error:
        return
    evidence = observation.evidence  # causes come before their effects
    for switch in evidence.switches:
        yield Finding("vacuous", switch)
    for failure in evidence.failures:
        yield Finding("vacuous", f"a compile failure was swallowed: {failure}")
    for hit in evidence.limit_hits:
        yield Finding("vacuous", f"the recompile limit was hit, later calls run uncompiled: {hit}")
    for reason in _reasons(observation):
        yield Finding("vacuous", reason)


def _reasons(observation: Observation) -> Iterator[str]:
    evidence, training = observation.evidence, observation.training
    if not evidence.graphs:
        why = "".join(f"; {each}" for each in evidence.graph_breaks[:1])
        yield f"no graph was captured: the model ran uncompiled{why}"
    elif not evidence.operations:
        yield f"{evidence.graphs} graphs hold no operator: the model ran uncompiled"
    elif training and observation.case.rung.compiles_backward and not _backward_ran(observation):
        yield "no compiled backward ran: gradients came from eager, or from nowhere"
    yield from _barely(observation)
    yield from _find_uncaptured(observation)


def _barely(observation: Observation) -> Iterator[str]:
    share = observation.cost.timed.compiled_share if observation.cost else None
    if share is not None and observation.evidence.operations and share < _LEAST_SHARE:
        yield f"only {share:.1%} of a step's operators run in compiled code"


def _find_uncaptured(observation: Observation) -> Iterator[str]:
    graphs = observation.evidence.cuda_graphs
    profile = observation.cost.timed.profile if observation.cost else None
    if graphs is None:
        return
    if not graphs.captures:
        why = "; ".join(each.reason for each in graphs.skips) or "no reason was given"
        yield f"no CUDA graph was captured: {why}"
    elif profile is not None and profile.graph_launches == 0:
        yield f"{graphs.captures} CUDA graphs were captured, and none is launched in a step after warm-up"


def _backward_ran(observation: Observation) -> bool:
    training = observation.training
    if training is None or not training.compiled_backwards:
        return False
    due = training.backwards_due or (True,) * len(training.compiled_backwards)
    return all(ran for ran, is_due in zip(training.compiled_backwards, due, strict=True) if is_due)
