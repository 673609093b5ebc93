"""Defines the one registry of job kinds: the built-in ones, and those of installed packages (entry points
``trivet.kinds``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Discriminator, TypeAdapter

from service.jobs.kinds.chain import CHAIN
from service.jobs.kinds.compile import COMPILE
from service.jobs.kinds.run import RUN
from service.jobs.kinds.script import SCRIPT
from service.jobs.kinds.train import TRAIN
from service.jobs.kinds.verify import VERIFY
from service.jobs.plugins import CommonSpec, JobKind
from service.jobs.plugins.catalogue import catalogue

KINDS = catalogue(JobKind, (TRAIN, VERIFY, COMPILE, CHAIN, RUN, SCRIPT))

if TYPE_CHECKING:
    JobSpec = CommonSpec
    KindName = str
else:
    JobSpec = Annotated[KINDS.union(), Discriminator(KINDS.tag), BeforeValidator(KINDS.refuse_unavailable)]
    KindName = Literal[tuple(KINDS.provided)]

spec_adapter: TypeAdapter[CommonSpec] = TypeAdapter(JobSpec)
"""Reads a spec of any kind."""
