"""Defines the spec of a job that runs a script of its author's."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from service.jobs.spec.common import CommonSpec, FileId, ParallelSpec, disagreement


def _as_text(value: Any) -> Any:
    """Return a number of YAML as the text that a command line would have."""
    return str(value) if type(value) in (int, float) else value


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or str(path) != value:
        raise ValueError("expected a path within the archive, such as src/train.py")
    return value


Argument = Annotated[str, BeforeValidator(_as_text), StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
InnerPath = Annotated[str, StringConstraints(min_length=1, max_length=400), AfterValidator(_inside)]


class ScriptSpec(CommonSpec):
    """Run a Python script of your own under torchrun, as it is; the operator allows it for a project."""

    kind: Literal["script"] = Field("script", description="a script of your own")
    archive: FileId = Field(
        description="the id of an uploaded zip, or uncompressed tar, of the script and its files; `trivet submit SPEC "
        "--set archive=@FOLDER` packs and uploads a folder"
    )
    entry: InnerPath = Field(
        pattern=r"\.py$",
        description="path in the archive of the Python file that every rank runs",
        examples=["train.py"],
    )
    args: list[Argument] = Field(
        default_factory=list,
        max_length=1000,
        description="arguments of the script, each a word of the command line",
        examples=[["--epochs", "3"]],
    )
    ranks: int = Field(1, ge=1, le=4096, description="processes of the script, each with a device of its own")
    keep: list[InnerPath] = Field(
        default_factory=list,
        max_length=64,
        description="patterns of files in the script's folder that become artifacts once it has succeeded",
        examples=[["out/*.pt"]],
    )

    @property
    def brings_code(self) -> bool:
        return True

    @model_validator(mode="before")
    @classmethod
    def _ranks_are_replicas(cls, given: Any) -> Any:
        """Take ``parallel`` from ``ranks``, unless it says something itself."""
        if not isinstance(given, dict) or "ranks" not in given:
            return given
        parallel = given.get("parallel", {})
        if not isinstance(parallel, dict) or any(size != 1 for size in parallel.values()):
            return given
        return {**given, "parallel": {"dp_replicate": given["ranks"]}}

    @model_validator(mode="after")
    def _divides_its_work_itself(self) -> ScriptSpec:
        if self.parallel != ParallelSpec(dp_replicate=self.ranks):
            got, expected = self.parallel.model_dump(), f"ranks: {self.parallel.world_size}, and no parallel"
            raise disagreement(
                "parallel", f"a script divides its work itself, and has ranks: {self.ranks}", got, expected
            )
        self.model_fields_set.discard("parallel")  # it says what ranks says, which a sweep may change
        if self.seed:
            raise disagreement("seed", "a script seeds itself", self.seed, "0, and an argument of the script")
        if self.max_hosts > 1:
            message = "a script has no network, by which its ranks would reach those of other hosts"
            raise disagreement("max_hosts", message, self.max_hosts, "1")
        return self
