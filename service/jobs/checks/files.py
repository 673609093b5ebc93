"""Checks that all uploaded files that a spec names exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from service.jobs.plugins import CheckContext, CommonSpec
from service.jobs.records import Problem
from service.jobs.spec.base import FILE_ID, FILE_ID_PREFIX


def files_of(spec: CommonSpec) -> Iterator[tuple[str, str]]:
    """Yield each uploaded file that the spec names, as the path of its field and its id."""
    text = spec.model_dump_json(by_alias=True, exclude={"name", "labels"})
    if FILE_ID_PREFIX in text:  # most specs name none
        yield from _files(orjson.loads(text), ())


def check_files(spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield which of the files that the spec names were never uploaded."""
    for path, file in files_of(spec):
        if not context.has_file(file):
            yield Problem(path, f"there is no {file}", file, "the id that an upload to /v1/files gave")


def _files(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _files(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _files(each, (*path, str(index)))
    elif isinstance(value, str) and FILE_ID.fullmatch(value):
        yield ".".join(path), value
