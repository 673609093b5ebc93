"""Reports parameters that training does not reach, although the model ran and its loss may be right.

A parameter that eager does not reach either counts if a loss depends on it: something cuts it off. One on which no
loss depends, such as the pooler of an encoder whose hidden states alone are used, is only noted.
"""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.run.notes import names_of
from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    training = observation.training
    if training is None:
        return
    if not training.trainable:
        yield Finding("frozen", "the model has no trainable parameter")
        return
    lost = training.unreached - training.unreached_eager
    if lost:
        yield Finding("frozen", f"no gradient where eager has one: {names_of(sorted(lost))}")
    dead = training.unreached & training.unreached_eager - training.unused
    if dead:
        yield Finding(
            "frozen",
            f"no gradient, in eager neither: {names_of(sorted(dead))}; losses depend on them, so something cuts them "
            "off: set requires_grad=False if they are not meant to train",
        )
    stuck = training.moved_eager - training.moved - lost
    if stuck:
        yield Finding("frozen", f"updates do not move what they move in eager: {names_of(sorted(stuck))}")
    if training.unsharded:
        yield Finding(
            "frozen",
            f"left whole by FSDP after the step, out of the optimizer's reach: {names_of(sorted(training.unsharded))}",
        )
    if not training.moved and not (lost or dead or stuck):
        yield Finding("frozen", "no parameter was moved by any update, in eager neither")
