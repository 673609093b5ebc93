"""Forms of specs, as the browser works them out: fields, variants, defaults, what is typed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page

from service.jobs.kinds.registry import KINDS, spec_adapter

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    return {kind: KINDS.declaration(kind).config.model_json_schema() for kind in KINDS.provided}


def test_every_field_of_a_spec_is_in_its_form(run: Any, schemas: dict[str, Any]) -> None:
    for kind, schema in schemas.items():
        fields = {field["name"]: field for field in run("schema", "fieldsOf", schema)}
        assert fields.keys() == schema["properties"].keys(), kind
        needed = {*schema.get("required", ()), *(("model", "data") if kind == "train" else ())}
        assert {name for name, field in fields.items() if field["required"]} == needed
    train = {field["name"]: field for field in run("schema", "fieldsOf", schemas["train"])}
    assert {
        name: train[name]["type"] for name in ("steps", "after", "labels", "preemptible", "device", "data", "batch")
    } == {
        "steps": "number",
        "after": "list",
        "labels": "map",
        "preemptible": "switch",
        "device": "choice",
        "data": "union",
        "batch": "group",
    }
    assert [field["path"] for field in train["batch"]["fields"]] == ["batch.global", "batch.micro"]


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ({"family": "mlp"}, "mlp"),
        ({"family": "transformer", "safetensors": "file_0"}, "transformer from safetensors"),
        ({"job": "job_0"}, "job"),
        ({"huggingface": "file_0"}, "huggingface"),
    ],
)
def test_a_value_is_shown_by_the_variant_that_it_has(
    run: Any, schemas: dict[str, Any], model: dict[str, str], title: str
) -> None:
    (field,) = (field for field in run("schema", "fieldsOf", schemas["train"]) if field["name"] == "model")
    assert field["variants"][run("schema", "chosen", field["variants"], model)]["title"] == title


def test_a_spec_without_its_defaults_is_the_same_spec(run: Any, schemas: dict[str, Any]) -> None:
    model = {"family": "convnet", "height": 8, "width": 8, "out_features": 10, "channels": [4]}
    given = {
        "train": {
            "model": model,
            "data": {"source": "digits"},
            "steps": 9,
            "optimizer": {"name": "adamw", "lr": 0.5},
            "parallel": {"tp": 2},
        },
        "verify": {
            "model": model,
            "property": {"robustness": {"data": {"source": "digits"}, "eps": 0.1}},
            "rigorous": True,
        },
        "compile": {"model": {**model, "safetensors": f"file_{'0' * 64}"}, "stall_s": None, "shapes": [4, 8]},
    }
    for kind, spec in given.items():
        whole = spec_adapter.validate_python({"kind": kind, **spec})
        short = run("schema", "withoutDefaults", json.loads(whole.model_dump_json(by_alias=True)), schemas[kind])
        assert short == {"kind": kind, **spec}
        assert spec_adapter.validate_python(short) == whole


def test_what_is_typed_into_a_field_is_read_as_it_is_shown(run: Any) -> None:
    for kind, text, value in (
        ("number", "1e-3", 0.001),
        ("list", "64, 128", [64, 128]),
        ("list", "job_1", ["job_1"]),
        ("map", "team=a, tried", {"team": "a", "tried": ""}),
        ("map", "eval_loss=<= 0.5, team=a=b", {"eval_loss": "<= 0.5", "team": "a=b"}),
        ("text", "12", "12"),
        ("free", '{"a": [1]}', {"a": [1]}),
        ("free", "latest", "latest"),
    ):
        field = {"type": kind}
        assert run("schema", "read", field, text) == value
        assert run("schema", "read", field, run("schema", "shown", field, value)) == value
    assert run("schema", "read", {"type": "text"}, "  ") is None
    for long in ("9223372036854775806", "9007199254740993.0", "9007199254740993e0"):  # more digits than JavaScript has
        assert run("schema", "read", {"type": "number"}, long) == long
    assert run("schema", "read", {"type": "number"}, "-2.50e300") == -2.5e300


def test_a_field_that_is_emptied_leaves_no_empty_group(run: Any, bench: Page) -> None:
    assert run("schema", "changed", {"steps": 1}, "batch.global", 8) == {"steps": 1, "batch": {"global": 8}}
    emptied = """async () => (await import("/static/lib/schema.js")).changed(
      {steps: 1, optimizer: {lr: 1}, batch: {global: 8, micro: 2}}, "optimizer.lr", undefined)"""
    assert bench.evaluate(emptied) == {"steps": 1, "batch": {"global": 8, "micro": 2}}


@pytest.mark.parametrize(
    ("name", "path"),
    [("net.onnx", "model.onnx"), ("q.vnnlib.gz", "property.vnnlib"), ("all.ZIP", "property.instances")],
)
def test_a_file_goes_where_its_name_says(run: Any, name: str, path: str) -> None:
    draft = run("drafts", "withFile", {"kind": "train"}, name, "file_1")
    assert (draft["kind"], run("schema", "at", draft, path)) == ("verify", "file_1")
    assert run("drafts", "withFile", {"kind": "train"}, "notes.txt", "file_1") is None
