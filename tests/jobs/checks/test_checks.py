"""Submit-time checks: every reason to refuse a job, with the field, the value and what would be accepted."""

from __future__ import annotations

from typing import Any

import pytest
from checked_specs import (
    CERTIFIED,
    CONVNET,
    DEEP,
    DIGITS,
    FILE,
    MLP,
    TOKENS,
    TRANSFORMER,
    A,
    B,
    C,
    fleet_context,
    found,
    job,
    message,
    spec,
)
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.checks.fit import pool_of
from service.jobs.plugins import CheckContext
from service.jobs.submission.check import check

PICTURES = {**CONVNET, "in_channels": 3, "height": 6, "width": 8}


def pictures(shape: list[int], **fields: Any) -> dict[str, Any]:
    return {"source": "file", "format": "arrays", "file": FILE, "shape": shape, "classes": 10, **fields}


GOOD = [
    spec("train"),
    spec("train", model=TRANSFORMER, data=TOKENS, parallel={"tp": 2, "pp": 2}),
    spec("train", batch={"global": 24, "micro": 3}, parallel={"dp_shard": 2}, pipeline={"micro_batches": 4}),
    spec("verify"),
    spec("verify", property={"box": {"lower": [0.0] * 64, "upper": [1.0] * 64}}),
    spec("compile"),
    spec("compile", model=TRANSFORMER, data=TOKENS),
    spec("train", model=CONVNET, parallel={"pp": 2, "tp": 4}),
    spec("verify", model=CONVNET),
    spec("verify", model=TRANSFORMER, property={"robustness": {"data": TOKENS, "eps": 0.1, "count": 2}}),
    spec(
        "verify",
        model=TRANSFORMER,
        property={"robustness": {"data": TOKENS, "eps": 0.1, "count": 2}},
        parallel={"pp": 2, "tp": 2},
    ),
    spec("verify", method="alpha-crown", parallel={"pp": 2}),
    spec("verify", method="beta-crown", parallel={"pp": 2, "tp": 2}),
    spec("train", batch={"global": 12, "micro": 3}, pipeline={"micro_batches": 2}),
    spec("train", objective={**CERTIFIED, "lower": -1, "upper": 0.5}),
    spec("train", objective=CERTIFIED, precision={"reduce": "bf16"}),
    spec("train", objective=CERTIFIED, parallel={"pp": 2, "tp": 2}),
    spec("train", objective={**CERTIFIED, "bound": "crown-ibp"}, parallel={"dp_shard": 2, "tp": 2}),
    spec("train", model=DEEP, parallel={"pp": 2}, pipeline={"schedule": "zbv"}),
    spec("train", model=PICTURES, data=pictures([3, 6, 8])),
    spec("train", model=PICTURES, data=pictures([6, 8, 3], axes=[2, 0, 1])),
    spec("train", model=PICTURES, data=pictures([144])),
    spec("train", model={**MLP, "in_features": 144}, data=pictures([6, 8, 3])),
    spec("train", model=DEEP, parallel={"pp": 2}, pipeline={"schedule": "interleaved", "virtual_stages": 4}),
]


@pytest.mark.parametrize("good", GOOD)
def test_what_fits_passes(good: Any) -> None:
    assert found(good, fleet={"cpu": 8}) == []
    assert found(good) == []


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        # data
        (
            spec("train", model=PICTURES, data=pictures([6, 8, 3])),
            [("data.shape", "(6, 8, 3)", "data of shape (3, 6, 8), or data.axes=[2, 0, 1], which moves them")],
        ),
        (
            spec("train", model=PICTURES, data=pictures([3, 6, 8], axes=[1, 2, 0])),
            [("data.shape", "(6, 8, 3)", "data of shape (3, 6, 8), or data.axes=[0, 1, 2], which moves them")],
        ),
        # mesh
        (spec("train", parallel={"pp": 3}, batch={"global": 6}), [("parallel.pp", 3, "at most 2")]),
        (spec("train", parallel={"tp": 8}), [("model.hidden.1", 12, "a multiple of 8")]),
        (
            spec("compile", model=TRANSFORMER, parallel={"tp": 3}),
            [("model.heads", 4, "a multiple of 3"), ("model.ffn_dim", 64, "a multiple of 3")],
        ),
        (
            spec("train", model=CONVNET, parallel={"tp": 8}),
            [("model.channels.0", 4, "a multiple of 8"), ("model.hidden.0", 12, "a multiple of 8")],
        ),
        (
            spec("train", model=DEEP, parallel={"pp": 4}, pipeline={"schedule": "interleaved", "virtual_stages": 3}),
            [("parallel.pp", 4, "at most 2")],
        ),
        (
            spec("train", parallel={"pp": 2}, pipeline={"schedule": "interleaved", "virtual_stages": 3}),
            [("parallel.pp", 2, "at most 2 stages")],
        ),
        (
            spec("train", parallel={"pp": 2}, batch={"global": 32}, sharding={"reduce": "every"}),
            [("sharding.reduce", "every", "last, or a mesh without a pipeline")],
        ),
        (
            spec("compile", model=DEEP, parallel={"pp": 2}, sharding={"reduce": "every"}),
            [("sharding.reduce", "every", "last, or a mesh without a pipeline")],
        ),
        (
            spec("train", parallel={"pp": 2}, batch={"global": 2**14}, pipeline={"micro_batches": 2**14}),
            [("pipeline.micro_batches", 2**14, "at most 8192")],
        ),
        # objective
        (
            spec("train", model=TRANSFORMER, data=TOKENS, objective=CERTIFIED),
            [("objective.name", "certified", "cross_entropy, or data of features")],
        ),
        (
            spec("train", objective={**CERTIFIED, "bound": "crown-ibp"}, parallel={"pp": 2}),
            [("objective.bound", "crown-ibp", "ibp, or parallel.pp of 1")],
        ),
        (
            spec("train", objective=CERTIFIED, activation_checkpoint="full", precision={"float8": True}),
            [("activation_checkpoint", "full", "none"), ("precision.float8", True, "false")],
        ),
        (spec("train", objective={**CERTIFIED, "lower": 1}), [("objective.lower", 1.0, "less than 1.0")]),
        (spec("train", objective={**CERTIFIED, "upper": -1}), [("objective.upper", -1.0, "more than 0.0")]),
        (spec("train", objective=CERTIFIED, precision={"param": "bf16"}), [("precision.param", "bf16", "fp32")]),
        # model and data
        (spec("train", model={**CONVNET, "height": 9}), [("model", 72, "64")]),
        (spec("train", model={**MLP, "in_features": 63}), [("model.in_features", 63, "64")]),
        (spec("compile", model={**MLP, "out_features": 9}, data=DIGITS), [("model.out_features", 9, "10")]),
        (
            spec("train", model={**MLP, "in_features": 7, "out_features": 2}),
            [("model.in_features", 7, "64"), ("model.out_features", 2, "10")],
        ),
        (spec("train", data={"source": "synthetic", "features": 64, "classes": 3}), [("model.out_features", 10, "3")]),
        (spec("train", data=TOKENS), [("data.source", "tokens", "a source of features")]),
        (spec("train", model=TRANSFORMER), [("data.source", "digits", "a source of tokens")]),
        (
            spec("train", model=TRANSFORMER, data={**TOKENS, "sequence": 33}),
            [("data.sequence", 33, "at most 32")],
        ),
        (
            spec("train", model={**TRANSFORMER, "vocab_size": 128}, data=TOKENS),
            [("model.vocab_size", 128, "vocab_size of at least 256")],
        ),
        # verification
        (spec("verify", model=TRANSFORMER), [("model.family", "transformer", "a model that reads features")]),
        (
            spec(
                "verify",
                model=TRANSFORMER,
                property={"robustness": {"data": {**TOKENS, "sequence": 33}, "eps": 0.1, "count": 2}},
            ),
            [("property.robustness.data.sequence", 33, "at most 32")],
        ),
        (spec("verify", model={**MLP, "in_features": 8}), [("model.in_features", 8, "64")]),
        (
            spec("verify", property={"robustness": {"data": DIGITS, "eps": 0.1, "count": 360}}),
            [("property.robustness.count", 360, "at most 359")],
        ),
        (
            spec("verify", property={"box": {"lower": [0.0], "upper": [1.0]}}),
            [("property.box.lower", 1, "64 numbers")],
        ),
        (
            spec(
                "verify",
                property={
                    "box": {
                        "lower": [0.0] * 64,
                        "upper": [1.0] * 64,
                        "output": [{"coefficients": [1.0] * 10}, {"coefficients": [1.0] * 9}],
                    }
                },
            ),
            [("property.box.output.1.coefficients", 9, "10 numbers")],
        ),
        # batch
        (spec("train", batch={"global": 10}, parallel={"dp_shard": 4}), [("batch.global", 10, "a multiple of 4")]),
        (spec("train", batch={"global": 12, "micro": 5}), [("batch.micro", 5, "a divisor of 12")]),
        (
            spec("train", batch={"global": 12, "micro": 3}, parallel={"pp": 2}, pipeline={"micro_batches": 2}),
            [("pipeline.micro_batches", 2, "4, or absent")],
        ),
        (
            spec("train", batch={"global": 10}, parallel={"pp": 2}),
            [("batch.global", 10, "a multiple of 4, or another pipeline.micro_batches")],
        ),
    ],
)
def test_what_does_not_fit_is_refused(bad: Any, expected: Any) -> None:
    assert found(bad) == expected


def test_files_that_are_named_must_have_been_uploaded() -> None:
    given_spec = spec("verify", name=FILE, model={"safetensors": FILE, **MLP})
    assert check(given_spec, CheckContext(has_file=lambda file: file == FILE)) == []
    (problem,) = check(given_spec, CheckContext(has_file=lambda _: False))
    assert (problem.path, problem.got) == ("model.safetensors", FILE)


def test_the_arithmetic_is_in_the_message() -> None:
    bad = spec("train", batch={"global": 10}, parallel={"dp_replicate": 2, "dp_shard": 2})
    assert message(bad) == "10 samples do not divide by dp_replicate=2 × dp_shard=2 = 4"
    bad = spec("train", batch={"global": 24, "micro": 5}, parallel={"dp_shard": 2})
    assert message(bad) == "global=24 / dp=2 = 12 samples per data-parallel rank do not divide by micro=5"
    bad = spec("train", parallel={"dp_shard": 8})
    assert "dp_shard=8 × tp=1 = 8 ranks, but the fleet has 4 cpu devices" in message(bad, fleet={"cpu": 4})


@pytest.mark.parametrize(
    ("given_spec", "path", "kind"),
    [
        (spec("train", after=[A]), "after.0", "a job"),
        (spec("verify", model={"job": A}), "model.job", "a train job"),
        (spec("train", compile={"train": True, "gate": A}), "compile.gate", "a compile job"),
    ],
)
def test_jobs_that_are_named_must_exist_and_not_have_failed(given_spec: Any, path: str, kind: Any) -> None:
    expected = f"{kind} that has succeeded or still can"
    assert found(given_spec) == [(path, A, expected)]
    right = "compile" if path == "compile.gate" else "train"
    ended_badly = f"{kind} that has succeeded, still can, or has left a checkpoint" if path == "model.job" else expected
    for state in ("failed", "cancelled"):
        assert found(given_spec, job(A, right, state)) == [(path, A, ended_badly)]
    for state in ("queued", "starting", "running", "cancelling", "succeeded"):
        assert found(given_spec, job(A, right, state)) == []


def test_jobs_that_are_named_must_be_of_the_right_kind() -> None:
    assert found(spec("verify", model={"job": A}), job(A, "verify"))[0][:2] == ("model.job", A)
    assert found(spec("train", compile={"train": True, "gate": A}), job(A, "train"))[0][:2] == ("compile.gate", A)


def test_all_named_jobs_are_dependencies() -> None:
    given_spec = spec("train", model={"job": A}, compile={"train": True, "gate": B}, after=[C, A])
    named = [(needed.path, needed.job_id, needed.kind) for needed in given_spec.dependencies()]
    assert named == [
        ("model.job", A, "train"),
        ("compile.gate", B, "compile"),
        ("after.0", C, None),
        ("after.1", A, None),
    ]


def test_the_model_of_a_job_is_checked_too() -> None:
    given_spec = spec("verify", model={"job": A}, parallel={"tp": 8})
    assert found(given_spec, job(A)) == [("parallel.tp", 8, "a divisor of 12")]
    assert f"job {A}, model.hidden.1: 12 does not divide by tp=8" in message(given_spec, job(A))
    deep = spec("train", model={"job": A}, parallel={"pp": 3}, batch={"global": 6})
    assert found(deep, job(A)) == [("parallel.pp", 3, "at most 2")]
    assert found(spec("verify", model={"job": A}), job(A, model=TRANSFORMER)) == [
        ("model.job", "transformer", "a model that reads features")
    ]
    narrow = job(A, model={**MLP, "in_features": 5})
    assert found(spec("train", model={"job": A}), narrow) == [("data", 64, "5")]
    small = job(A, model={**TRANSFORMER, "vocab_size": 64})
    assert found(spec("train", model={"job": A}, data=TOKENS), small) == [
        ("data.source", "tokens", "vocab_size of at least 256")
    ]


def test_a_model_is_followed_through_jobs_that_start_from_others() -> None:
    chain = [job(A, model={"job": B}), job(B, model={"job": C, "step": 3}), job(C, model=TRANSFORMER)]
    assert found(spec("verify", model={"job": A}), *chain) == [
        ("model.job", "transformer", "a model that reads features")
    ]
    assert found(spec("verify", model={"job": A}), *chain[:2]) == []
    assert found(spec("verify", model={"job": A}), job(A, model={"job": A})) == []


def test_a_job_whose_model_is_no_longer_known_is_refused() -> None:
    gone = job(B, model={"family": "gone", "size": 3})
    for given_spec in (
        spec("verify", model={"job": A}),
        spec("train", model={"job": A}),
        spec("compile", model={"job": A}),
    ):
        for chain in ((job(A, model=gone.spec["model"]),), (job(A, model={"job": B}), gone)):
            assert found(given_spec, *chain) == [("model.job", A, "a train job whose model this installation knows")]
            assert f"the model of job {chain[-1].id} cannot be read: Input tag 'gone'" in message(given_spec, *chain)


def test_more_ranks_than_devices_are_refused_once_the_fleet_is_known() -> None:
    given_spec = spec("train", parallel={"dp_shard": 8})
    assert found(given_spec) == []
    assert found(given_spec, fleet={"cpu": 8}) == []
    assert found(given_spec, fleet={"cpu": 7}) == [("parallel", 8, "at most 7 ranks")]
    assert found(given_spec, fleet={"cpu": 99, "cuda": 4}) == [("parallel", 8, "at most 4 ranks")]


def test_a_device_that_the_fleet_lacks_is_refused() -> None:
    assert found(spec("train", device="cuda"), fleet={"cpu": 8}) == [("device", "cuda", "a device that it has: cpu")]
    assert found(spec("train"), fleet={}) == [("device", "auto", "a device that it has: none")]


def test_float8_needs_gpus() -> None:
    given_spec = spec("train", precision={"float8": True})
    assert found(given_spec, fleet={"cpu": 8}) == [("precision.float8", True, "false")]
    assert found(given_spec, fleet={"cpu": 8, "cuda": 1}) == found(given_spec) == []
    assert found(given_spec, fleet={"cpu": 8}, drained={"cuda": 8}) == [("precision.float8", True, "false")]
    assert found(spec("compile", precision={"float8": True}), fleet={"cpu": 8}) == [("precision.float8", True, "false")]


TIMM = {"family": "timm", "name": "resnet10t", "channels": 1, "height": 8, "width": 8, "classes": 10}


@pytest.mark.parametrize(("model", "refused"), [(CONVNET, False), ({**CONVNET, "hidden": []}, True), (TIMM, True)])
@pytest.mark.parametrize("kind", ["train", "compile"])
def test_float8_needs_linear_layers_of_ours(kind: str, model: dict[str, Any], refused: bool) -> None:
    given_spec = spec(kind, model=model, precision={"float8": True})
    assert found(given_spec) == [("precision.float8", True, "false")] * refused


def test_a_job_fits_where_auto_stands_now_or_will_once_drained_hosts_are_resumed() -> None:
    wide = spec("train", parallel={"dp_replicate": 4}, batch={"global": 4})
    assert found(wide, fleet={"cpu": 4}, drained={"cuda": 2}) == []
    assert found(wide, fleet={"cpu": 2}, drained={"cuda": 4}) == []
    assert found(wide, fleet={"cpu": 2, "cuda": 2}, drained={"cuda": 2}) == []
    assert found(wide, fleet={"cpu": 2}, drained={"cuda": 3}) == [("parallel", 4, "at most 3 ranks")]


@pytest.mark.parametrize(
    ("device", "fleet", "pool"),
    [
        ("auto", {"cpu": 1}, "cpu"),
        ("auto", {"cpu": 1, "cuda": 1}, "cuda"),
        ("cpu", {"cuda": 1}, "cpu"),
        ("auto", {}, "cpu"),
    ],
)
def test_auto_means_cuda_where_there_is_any(device: str, fleet: dict[str, int], pool: str) -> None:
    assert pool_of(spec("train", device=device), fleet_context(fleet)) == pool


degrees = st.integers(1, 4)


@given(
    pp=st.integers(1, 2),
    replicate=degrees,
    shard=degrees,
    tp=degrees,
    batch=st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    micro_batches=st.none() | st.integers(1, 8),
    cpu=st.none() | st.integers(0, 64),
)
def test_a_spec_that_passes_adds_up(**drawn: Any) -> None:
    given_spec = spec(
        "train",
        model={**MLP, "hidden": [12, 12]},
        parallel={"pp": drawn["pp"], "dp_replicate": drawn["replicate"], "dp_shard": drawn["shard"], "tp": drawn["tp"]},
        batch={"global": drawn["batch"], "micro": drawn["micro"]},
        pipeline={"micro_batches": drawn["micro_batches"]},
    )
    fleet = None if drawn["cpu"] is None else {"cpu": drawn["cpu"]}
    if check(given_spec, CheckContext(fleet)):
        return
    dp, forwards = given_spec.parallel.dp, given_spec.micro_batches
    size = drawn["batch"] // (dp * forwards)
    assert dp * forwards * size == drawn["batch"]
    assert size == (drawn["micro"] or size)
    if drawn["micro_batches"] is not None and drawn["pp"] > 1:
        assert forwards == drawn["micro_batches"]
    assert 12 % drawn["tp"] == 0
    assert fleet is None or given_spec.parallel.world_size <= fleet["cpu"]


def test_a_model_of_a_package_needs_a_host_that_has_it() -> None:
    model = {"family": "torchvision", "name": "resnet18", "height": 1, "width": 8, "classes": 10}
    data = {"source": "synthetic", "features": 24, "classes": 10}
    for given_spec in (spec("train", model=model, data=data), spec("compile", model=model)):
        (problem,) = check(given_spec, CheckContext(fleet_packages={"timm"}))
        assert (problem.path, problem.message) == ("model.family", "no worker host has the package torchvision")
        assert check(given_spec, CheckContext(fleet_packages={"torchvision"})) == []
    (problem,) = check(spec("train", model=model, data=data, parallel={"tp": 2}), CheckContext())
    assert problem.message == "torchvision has no layers that tensor parallelism divides (`divided`)"


def test_the_pipeline_of_a_compile_job_is_checked_as_that_of_a_training_job() -> None:
    two = {"model": {**MLP, "hidden": [12, 12]}, "parallel": {"pp": 2}}
    assert check(spec("compile", **two), CheckContext()) == []
    for change, path in [
        ({"parallel": {"pp": 3}}, "parallel.pp"),
        ({"pipeline": {"schedule": "zero_bubble", "micro_batches": 2**14}}, "pipeline.micro_batches"),
        ({"pipeline": {"schedule": "interleaved"}}, "parallel.pp"),
    ]:
        assert [problem.path for problem in check(spec("compile", **{**two, **change}), CheckContext())] == [path]
