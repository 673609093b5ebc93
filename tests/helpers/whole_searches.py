"""Searches that run in one turn until their deadline, as no job takes them."""

from __future__ import annotations

from service.bounds.methods import Method
from service.verification.bab.activations.search import begin_splitting_activations
from service.verification.bab.decision import ProgressListener, SearchResult
from service.verification.bab.inputs.search import begin_splitting_inputs
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification


def split_activations(
    model: ModelUnderVerification, goal: Specification, method: Method, deadline: float, listener: ProgressListener
) -> SearchResult:
    return begin_splitting_activations(model, goal, method, deadline, listener).run(deadline)


def split_inputs(
    model: ModelUnderVerification, goal: Specification, method: Method, deadline: float, listener: ProgressListener
) -> SearchResult:
    return begin_splitting_inputs(model, goal, method, deadline, listener).run(deadline)
