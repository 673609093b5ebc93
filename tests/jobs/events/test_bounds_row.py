"""The bounds row is declared once: its event, Parquet schema, OpenAPI model and the page's type are derived from it."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pyarrow
import pytest
import torch
from pyarrow import parquet
from pydantic import TypeAdapter

from api.main import create_app
from service.jobs.events import LONGEST_EVENT, ROW_VERDICTS, BoundsRow, MalformedEvent, parse_event
from service.jobs.events.event import BOUND_FIELDS
from service.jobs.settings import Settings
from service.verification import results
from service.verification.counterexamples import CounterexampleOutputs
from service.verification.verdict import Verdict

NAMES = [field.name for field in fields(BoundsRow)]
TYPES_JS = Path(__file__).parents[3] / "api" / "dashboard" / "static" / "lib" / "types.js"
FIELDS_OF_THE_INTERFACE = [
    "instance", "name", "label", "prediction", "verdict", "lower", "upper", "margin", "method", "decided_by", "reason",
    "note", "seconds", "domains", "counterexample", "counterexample_outputs", "onnxruntime_outputs", "sample",
    "sample_outputs",
]  # fmt: skip
ROW = BoundsRow(
    instance=3, verdict="falsified", lower=[-1.0, None], upper=[1.0, None], margin=-0.5, method="crown",
    decided_by="attack", seconds=0.25, domains=7, counterexample=[0.5],
)  # fmt: skip


def test_the_interface_has_these_fields_in_this_order() -> None:
    assert NAMES == FIELDS_OF_THE_INTERFACE
    assert list(ROW.as_dict()) == NAMES


def test_every_verdict_of_a_bound_is_one_of_a_row() -> None:
    assert {verdict.value for verdict in Verdict} | {"timeout"} == set(ROW_VERDICTS)


def test_a_row_travels_as_an_event() -> None:
    event = parse_event(json.dumps({**ROW.as_dict(), "type": "bound", "time": 1.0}).encode(), rank=0)
    assert {name: event[name] for name in NAMES} == ROW.as_dict()  # type: ignore[literal-required]
    assert list(BOUND_FIELDS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_event_with_a_field_of_another_type_is_refused(name: str) -> None:
    broken = {**ROW.as_dict(), "type": "bound", name: {}}
    with pytest.raises(MalformedEvent, match=f"'{name}'"):
        parse_event(json.dumps(broken).encode(), rank=0)


def test_the_parquet_schema_has_a_column_for_every_field(tmp_path: Path) -> None:
    numbers = pyarrow.list_(pyarrow.float64())
    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "list": numbers}
    for field in results.SCHEMA:
        annotation = str(get_type_hints(BoundsRow)[field.name])
        expected = "str" if annotation.startswith("typing.Literal") else re.findall("list|int|float|str", annotation)[0]
        assert field.type == kinds[expected], field.name
    written = parquet.read_table(results.write_rows([ROW], tmp_path))
    assert written.schema.names == NAMES
    assert written.to_pylist() == [ROW.as_dict()]


def test_infinite_bounds_are_words_in_json_and_numbers_in_parquet(tmp_path: Path) -> None:
    row = replace(ROW, lower=["-Infinity", 1.0], upper=[2.0, "Infinity"])
    event = parse_event(json.dumps({**row.as_dict(), "type": "bound", "time": 1.0}).encode(), rank=0)
    read = TypeAdapter(BoundsRow).validate_python({name: event[name] for name in NAMES})  # type: ignore[literal-required]
    assert (read.lower, read.upper) == (["-Infinity", 1.0], [2.0, "Infinity"])
    (written,) = parquet.read_table(results.write_rows([row], tmp_path)).to_pylist()
    assert (written["lower"], written["upper"]) == ([-math.inf, 1.0], [2.0, math.inf])


def test_a_row_of_a_falsified_photograph_is_no_longer_than_an_event_may_be() -> None:
    photograph = torch.rand(3 * 224 * 224, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row = replace(ROW, counterexample=photograph.tolist())
    row = results.around(row, photograph, CounterexampleOutputs((0.5,), None))
    assert len(orjson.dumps({**row.as_dict(), "type": "bound"})) < LONGEST_EVENT
    assert row.sample_outputs == [0.5]
    assert results.around(ROW, torch.ones(1), CounterexampleOutputs((0.5,), None)).sample == [1.0]


@pytest.fixture(scope="module")
def schema() -> Mapping[str, Any]:
    """The row's model in the OpenAPI document."""
    found: Mapping[str, Any] = create_app(Settings()).openapi()["components"]["schemas"]["BoundsRow"]
    return found


def test_the_openapi_model_has_every_field(schema: Mapping[str, Any]) -> None:
    assert list(schema["properties"]) == NAMES
    assert schema["required"] == [field.name for field in fields(BoundsRow) if field.default is MISSING]
    assert schema["properties"]["verdict"]["enum"] == list(ROW_VERDICTS)
    assert schema["description"] == inspect.getdoc(BoundsRow)


def test_the_page_reads_what_the_openapi_document_describes(schema: Mapping[str, Any]) -> None:
    """The JSDoc type is compared name by name and type by type; what follows a name is for its readers."""
    (block,) = re.findall(r"@typedef \{object\} BoundsRow\n((?: \* @property .*\n)+)", TYPES_JS.read_text())
    written = re.findall(r"@property \{(.+?)\} (\S+)", block)
    described = [
        (_jsdoc(kind), name if name in schema["required"] else f"[{name}]")
        for name, kind in schema["properties"].items()
    ]
    assert written == described


def _jsdoc(kind: Mapping[str, Any]) -> str:
    """Return the JSDoc type of a JSON schema."""
    if "enum" in kind:
        return " | ".join(json.dumps(value) for value in kind["enum"])
    if "anyOf" in kind:
        return " | ".join(_jsdoc(each) for each in kind["anyOf"])
    if kind["type"] == "array":
        items = _jsdoc(kind["items"])
        return f"({items})[]" if " " in items else f"{items}[]"
    return {"integer": "number", "number": "number", "string": "string", "null": "null"}[kind["type"]]
