"""Lists the rules by which a sweep stops jobs early that do worse than others: a file each, and a line here."""

from typing import Annotated

from pydantic import Field

from service.jobs.spec.common.halving import Halving
from service.jobs.spec.common.median_rule import MedianRule

AnyRule = Annotated[
    Halving
    | MedianRule,
    Field(discriminator="rule"),
]  # fmt: skip
