"""What an installed package may do wrong, and what it cannot break."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from service.jobs.plugins import DataConfig, DataSource, Features, ModelConfig, ModelFamily, Samples
from service.jobs.plugins.catalogue import Catalogue, catalogue, installed
from service.jobs.spec import base, common
from service.jobs.spec.families import FAMILIES, MlpConfig

BUILT_IN = ModelFamily(MlpConfig, "service.models.mlp:Mlp")


class NoFamily(ModelConfig):
    """Fixes no name."""

    @property
    def reads(self) -> Samples:
        return Features(1, 2)


class Good(NoFamily):
    family: Literal["good"] = "good"
    size: int = Field(1, ge=1)


class Unfinished(ModelConfig):
    family: Literal["good"] = "good"


class SomeData(DataConfig):
    source: Literal["good"] = "good"

    @property
    def gives(self) -> Samples:
        return Features(1, 2)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_package")
    monkeypatch.setitem(sys.modules, "a_package", module)
    return module


def found(*points: tuple[str, str]) -> Catalogue[ModelFamily]:
    def find(group: str) -> Sequence[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in points]

    return catalogue(ModelFamily, [BUILT_IN], find)


def test_a_declared_family_is_one_of_the_choices(package: ModuleType) -> None:
    package.FAMILY = ModelFamily(Good, "a_package:build")  # type: ignore[attr-defined]
    known = found(("good", "a_package:FAMILY"))
    assert known.provided.keys() == {"mlp", "good"}
    assert known.unavailable == ()
    form: TypeAdapter[ModelConfig] = TypeAdapter(Annotated[known.union(), Field(discriminator="family")])
    assert form.validate_python({"family": "good", "size": 3}) == Good(size=3)
    with pytest.raises(ValidationError, match="expected tags: 'mlp', 'good'"):
        form.validate_python({"family": "bad"})


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        (None, "a_package:FAMILY is a NoneType; expected a ModelFamily"),
        (DataSource(SomeData, ""), "is a DataSource; expected a ModelFamily"),
        (ModelFamily(SomeData, ""), "expected a subclass of ModelConfig"),  # type: ignore[arg-type]
        (ModelFamily(Unfinished, ""), "Unfinished lacks reads"),
        (ModelFamily(NoFamily, ""), 'NoFamily must have one name, as in family: Literal["name"] = "name"'),
        (ModelFamily(MlpConfig, ""), "MlpConfig is named 'mlp', its entry point 'good'"),
    ],
)
def test_a_wrong_declaration_is_set_aside_with_the_reason(package: ModuleType, declaration: Any, reason: str) -> None:
    package.FAMILY = declaration  # type: ignore[attr-defined]
    known = found(("good", "a_package:FAMILY"))
    assert known.provided.keys() == {"mlp"}
    assert reason in known.unavailable[0].reason


class Other(SomeData):
    source: Literal["other"] = "other"  # type: ignore[assignment]


class Unfixed(DataConfig):
    source: Literal["good"] = "good"


class Rows(SomeData):
    format: Literal["rows"] = "rows"


class Columns(SomeData):
    format: Literal["columns"] = "columns"


class Twin(Rows):
    """Another form of the same format."""


def sources(declaration: Any, package: ModuleType) -> Catalogue[DataSource]:
    package.SOURCE = declaration  # type: ignore[attr-defined]
    return catalogue(DataSource, [], lambda group: [EntryPoint("good", "a_package:SOURCE", group)])


def test_a_source_may_have_several_forms(package: ModuleType) -> None:
    known = sources(DataSource(Rows, "", (Columns,)), package)
    assert known.unavailable == ()
    form: TypeAdapter[DataConfig] = TypeAdapter(known.union())
    assert form.validate_python({"source": "good", "format": "columns"}) == Columns()


@pytest.mark.parametrize(
    ("variants", "reason"),
    [
        ((Good,), "its variant is <class 'test_catalogue.Good'>; expected a subclass of DataConfig"),
        ((Columns(),), "its variant is Columns("),
        ((Unfixed,), "Unfixed lacks gives"),
        ((Other,), "Other is named 'other', its entry point 'good'"),
        ((SomeData,), "Model 'SomeData' needs a discriminator field for key 'format'"),
        ((Twin, Columns), "Value 'rows' for discriminator 'format' mapped to multiple choices"),
        (3, "TypeError"),
    ],
)
def test_a_source_with_a_wrong_form_is_set_aside(package: ModuleType, variants: Any, reason: str) -> None:
    known = sources(DataSource(Rows, "", variants), package)
    assert known.provided == {}
    assert reason in known.unavailable[0].reason


def test_whatever_a_package_raises_takes_nothing_else_down(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_package.py").write_text("raise SystemExit('done')")
    monkeypatch.syspath_prepend(tmp_path)
    known = found(("gone", "no_such_package:X"), ("left", "leaving_package:X"))
    assert [each.reason for each in known.unavailable] == [
        "ModuleNotFoundError: No module named 'no_such_package'",
        "SystemExit: done",
    ]
    assert known.provided.keys() == {"mlp"}


def test_nobody_gets_a_name_that_several_claim_or_that_is_taken(package: ModuleType) -> None:
    package.FAMILY = ModelFamily(Good, "a_package:build")  # type: ignore[attr-defined]
    known = found(("good", "a_package:FAMILY"), ("good", "a_package:FAMILY"), ("mlp", "a_package:FAMILY"))
    assert known.provided.keys() == {"mlp"}
    assert [each.reason for each in known.unavailable] == [
        "2 installed packages claim this name",
        "2 installed packages claim this name",
        "the name is taken by a built-in one",
    ]
    with pytest.raises(ValidationError, match=r"family 'good' of unknown .* unavailable: 2 installed packages claim"):
        TypeAdapter(Annotated[Any, BeforeValidator(known.refuse_unavailable)]).validate_python({"family": "good"})


def test_one_package_on_the_path_twice_is_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        info = tmp_path / name / "twin-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[trivet.test]\nsame = a_package:FAMILY\n")
        monkeypatch.syspath_prepend(tmp_path / name)
    assert [point.name for point in installed("trivet.test")] == ["same"]


def test_the_built_in_families_come_with_this_distribution() -> None:
    assert {each.distribution for each in FAMILIES.provided.values()} >= {"trivet"}
    assert list(FAMILIES.provided)[:3] == ["mlp", "convnet", "transformer"]


def test_names_are_also_where_packages_have_found_them() -> None:
    assert [getattr(base, name) is getattr(common, name) for name in base.__all__] == [True] * 5
