"""What schedule, end and optimizer of a training ask for is refused at submit where a rank could not give it."""

from __future__ import annotations

from typing import Any

import pytest
from checked_specs import CERTIFIED, DIGITS, TOKENS, TRANSFORMER, A, found, job, spec
from pydantic import ValidationError

PLATEAU = {"decay": "plateau"}
MUON = {"name": "muon", "adamw": {"match": ["head.*"]}}
START = f"or start from its weights by model: {{job: {A}}}"
FLOAT8 = {"float8": True}


def stop(metric: str = "eval_loss", **fields: Any) -> dict[str, Any]:
    return {"when": {metric: {"patience": 2, **fields}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": stop(), "evaluate": {"every": 2}}, []),
        ({"stop": stop("eval_accuracy", mode="max"), "evaluate": {"every": 2}}, []),
        ({"stop": stop()}, [("evaluate.every", None, "a number of steps below 9")]),
        ({"schedule": PLATEAU, "evaluate": {"every": 9}}, [("evaluate.every", 9, "a number of steps below 9")]),
        (
            {"stop": stop("eval_accuracy"), "evaluate": {"every": 2}},
            [("stop.when.eval_accuracy.mode", "min", "max")],
        ),
        (
            {"stop": stop("eval_los"), "evaluate": {"every": 2}},
            [("stop.when.eval_los", "eval_los", "one of eval_loss, eval_accuracy")],
        ),
        (
            {
                "model": TRANSFORMER,
                "data": TOKENS,
                "schedule": {**PLATEAU, "metric": "eval_accuracy", "mode": "max"},
                "evaluate": {"every": 2},
            },
            [("schedule.metric", "eval_accuracy", "one of eval_loss, eval_perplexity")],
        ),
        ({"schedule": {"decay": "wsd", "warmup": 3, "last": 7}}, [("schedule.last", 7, "at most 6")]),
        ({"schedule": {"decay": "wsd", "warmup": 10, "last": 1}}, [("schedule.warmup", 10, "at most 9")]),
        ({"precision": FLOAT8, "batch": {"global": 24, "micro": 12}}, [("batch.micro", 12, "a multiple of 16")]),
        ({"precision": FLOAT8, "batch": {"global": 24}}, [("batch.global", 24, "a multiple of 16")]),
        ({"schedule": {"warmup": 10}}, [("schedule.warmup", 10, "at most 9")]),
        ({"optimizer": MUON}, []),
        (
            {"optimizer": {**MUON, "groups": [{"match": ["*.bias", "head.white"]}]}},
            [("optimizer.groups.0.match", "head.white", "one such as head.weight, head.bias, blocks.1.linear.weight")],
        ),
        (
            {"optimizer": {"groups": [{"match": ["blocks.*"], "frozen": True}, {"match": ["head.*"], "frozen": True}]}},
            [("optimizer.groups", None, "one that learns")],
        ),
    ],
)
def test_what_a_training_follows_must_be_there(fields: dict[str, Any], expected: list[tuple[str, Any, str]]) -> None:
    assert found(spec("train", steps=9, **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "theirs", "expected"),
    [
        ({"optimizer": {"lr": 0.5, "weight_decay": 1}, "schedule": {"warmup": 3}}, {}, []),
        ({"optimizer": {"name": "sgd", "momentum": 0.5}}, {"optimizer": {"name": "sgd", "momentum": 0.9}}, []),
        ({"optimizer": "lion"}, {}, [("optimizer.name", "lion", f"adamw, {START}")]),
        (
            {"optimizer": {"name": "sgd", "momentum": 0.5}},
            {"optimizer": "sgd"},
            [("optimizer.momentum", "True", f"False, {START}")],
        ),
        (
            {"optimizer": {"groups": [{"match": ["head.*"], "frozen": True}]}},
            {},
            [("optimizer.groups", "[(('head.*',), True)]", f"[], {START}")],
        ),
        (
            {"optimizer": {"name": "muon", "adamw": {"match": []}}},
            {"optimizer": MUON},
            [("optimizer.adamw.match", "()", f"('head.*',), {START}")],
        ),
        ({"schedule": "constant"}, {}, [("schedule.decay", "constant", f"cosine, {START}")]),
    ],
)
def test_a_resumed_training_keeps_its_optimizer_and_schedule(
    fields: dict[str, Any], theirs: dict[str, Any], expected: list[tuple[str, Any, str]]
) -> None:
    first = job(A, data=DIGITS, steps=5, state="running", **theirs)
    assert found(spec("train", steps=9, resume={"job": A}, **fields), first) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "adam"}, "Input tag 'adam' found using 'name'"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "momentum: nesterov=true looks ahead"),
        ({"optimizer": {"name": "sgd", "betas": [0, 0]}}, "betas"),
        ({"optimizer": {"name": "muon"}}, "adamw"),
        ({"optimizer": {"groups": [{"match": []}]}}, "groups.0.match"),
        ({"schedule": "exponential"}, "Input tag 'exponential' found using 'decay'"),
        ({"schedule": {"decay": "wsd"}}, "last"),
        ({"stop": {"when": {}}}, "stop.when"),
        ({"stop": {"when": {"loss": {"patience": 2}}}}, "stop.when.loss"),
    ],
)
def test_values_that_say_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec("train", **fields)


def test_a_compile_check_takes_an_objective_that_can_be_compiled() -> None:
    assert found(spec("compile", objective="cross_entropy")) == []
    assert found(spec("compile", objective=CERTIFIED)) == [
        ("objective.name", "certified", "cross_entropy, or another one")
    ]


def test_a_worker_of_an_older_version_reads_what_uses_nothing_new() -> None:
    plain = spec("train").model_dump(mode="json", by_alias=True)
    assert "stop" not in plain
    assert list(plain["optimizer"]) == ["name", "lr", "weight_decay", "clip_norm", "betas", "eps"]
    assert plain["schedule"] == {"decay": "cosine", "warmup": 0, "floor": 0.1}
    assert "objective" not in spec("compile").model_dump(mode="json", by_alias=True)
