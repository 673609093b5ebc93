"""Defines the spec of a verification job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from service.jobs.plugins import Features
from service.jobs.spec.common import CommonSpec, Dependency, FileId, Strict, disagreement
from service.jobs.spec.data import DataSpec
from service.jobs.spec.model import ModelRef, jobs_of


def _refuse_rounded(value: Any) -> Any:
    """Refuse an integer that float64 would round, whose every digit may matter, and true and false for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    if isinstance(value, int) and 2**53 < abs(value) < 2**1023 and int(float(value)) != value:
        message = "{value} is between two float64 numbers, the nearer of which is {nearest}"
        raise PydanticCustomError("rounded_number", message, {"value": str(value), "nearest": str(int(float(value)))})
    return value


Real = Annotated[float, BeforeValidator(_refuse_rounded)]
"""A number of a property: the float64 that is nearest to the decimal, exactly."""


def _refuse_truth(value: Any) -> Any:
    """Refuse true and false, which Python takes for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("literal_error", "Input should be 'inf', 2, 1 or 0")
    return value


Norm = Annotated[Literal["inf", 2, 1, 0], BeforeValidator(_refuse_truth)]
"""The order of a norm of changes; 0 counts the entries that change."""


class Robustness(Strict):
    """No input within ``eps`` (in the data's units, by ``norm``) of a test sample changes its correct class.

    For a sequence of tokens, the input is their embedding and the class is the token that follows the last.
    """

    data: DataSpec = Field(description="the source of the samples; its test split is used")
    count: int = Field(16, ge=1, le=10**6, description="how many samples of the test split, from the first")
    eps: Real = Field(
        gt=0,
        description="the radius of the ball around each sample, in the data's units; for norm: 0, how "
        "far an entry may move",
    )
    norm: Norm = Field(
        "inf",
        description="inf: no entry moves by more than eps; 2: Euclidean distance; 1: the changes of all entries add up "
        "to eps at most; 0: at most ``entries`` entries move, each by eps at most",
    )
    entries: int | None = Field(
        None, ge=1, le=2**24, description="how many entries of a sample may change, for norm: 0; None for other norms"
    )
    clip: Literal["data"] | tuple[Real, Real] | None = Field(
        None,
        description="range of the inputs: the least and the greatest number, such as [0, 1], or data for the source's "
        "own range; without it the whole ball is verified",
    )

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the least and the greatest number of an input, if the ball is clipped to them."""
        if self.clip != "data":
            return self.clip
        gives = self.data.gives
        return gives.limits if isinstance(gives, Features) else None

    @model_validator(mode="after")
    def _entries_are_counted(self) -> Robustness:
        if self.norm == 0 and self.entries is None:
            raise disagreement("entries", "norm 0 counts the entries that change", None, "how many may change")
        if self.norm != 0 and self.entries is not None:
            message = f"norm={self.norm} lets every entry change"
            raise disagreement("entries", message, self.entries, "none, or norm: 0")
        gives = self.data.gives
        if self.entries is not None and isinstance(gives, Features) and self.entries > gives.features:
            message = f"a sample has {gives.features} entries"
            raise disagreement("entries", message, self.entries, f"at most {gives.features}, or norm: inf")
        return self

    @model_validator(mode="after")
    def _can_be_clipped(self) -> Robustness:
        if self.clip is None:
            return self
        if not isinstance(self.data.gives, Features):
            raise disagreement("clip", "inputs are embeddings of tokens, which have no range", self.clip, "none")
        if self.limits is None:
            message = f"the range of source={self.data.source} is not known"
            raise disagreement("clip", message, self.clip, "the least and the greatest number, such as [0, 1]")
        if self.limits[0] >= self.limits[1]:
            raise disagreement("clip", "the range is empty", self.clip, "the least number before the greatest")
        return self


class OutputHalfspace(Strict):
    """``coefficients · output ≥ threshold`` must hold on the whole box."""

    coefficients: tuple[Real, ...] = Field(min_length=1, fail_fast=True, description="a coefficient for each output")
    threshold: Real = Field(0.0, description="the least value that the weighted sum may have")


class Box(Strict):
    """Bounds of the outputs on one input box; with ``output`` halfspaces, also a verdict.

    A number is the float64 nearest to its decimal; verdicts are about exactly these numbers.
    """

    lower: tuple[Real, ...] = Field(min_length=1, fail_fast=True, description="the least value of each input")
    upper: tuple[Real, ...] = Field(min_length=1, fail_fast=True, description="the greatest value of each input")
    output: tuple[OutputHalfspace, ...] = Field(
        (), fail_fast=True, description="conditions on the outputs; none: they are only bounded"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Box:
        if len(self.lower) != len(self.upper):
            message = f"lower has {len(self.lower)} entries and upper {len(self.upper)}"
            raise disagreement("upper", message, len(self.upper), f"{len(self.lower)} numbers")
        for index, (low, high) in enumerate(zip(self.lower, self.upper, strict=True)):
            if low > high:
                message = f"lower.{index}={low} is above upper.{index}={high}"
                raise disagreement(f"lower.{index}", message, low, f"at most {high}")
        return self


class FromOnnx(Strict):
    """A network in an uploaded ONNX file, opset 8 to 24; inputs and outputs are flattened.

    Several of them are side by side, in their order: ``X_0`` … of a query are entries of the inputs that are
    not fixed, ``Y_0`` … of the outputs. An input of whole numbers takes the nearest ones.
    """

    onnx: FileId = Field(description="the id of an uploaded ONNX file")
    outputs: tuple[str, ...] = Field(
        (),
        max_length=1000,
        fail_fast=True,
        description="names of the outputs to bound, or of any other values in the file; when absent, every output "
        "that can be bounded",
    )
    inputs: dict[str, Real | tuple[Real, ...]] = Field(
        {},
        max_length=1000,
        description="inputs that are fixed: one number for all entries, or each entry's; the others are bounded",
    )
    dimensions: dict[str, Annotated[int, Field(ge=1, le=2**24)]] = Field(
        {},
        max_length=1000,
        description="lengths that the file leaves open, by name, or by INPUT.PLACE (from 0) if they have none; an "
        "input's first length is 1 unless it is given",
    )

    def choices(self) -> dict[str, Any]:
        """Return the choices from the file, by the names of the fields; empty if it is used unchanged."""
        return self.model_dump(mode="json", include={"outputs", "inputs", "dimensions"}, exclude_defaults=True)


class VnnlibProperty(Strict):
    """Queries of uploaded VNN-LIB files, of version 1 or 2.0: *verified* if no input satisfies one, *falsified* by one.

    A file is a text, compressed by gzip or not, or a zip or an uncompressed tar of such files, each of which is an
    instance, in order of their paths. Several files are instances one after the other.
    """

    vnnlib: Annotated[
        Annotated[FileId, Tag("one")]
        | Annotated[tuple[FileId, ...], Field(min_length=1, max_length=10_000, fail_fast=True), Tag("several")],
        Discriminator(lambda value: "one" if isinstance(value, str) else "several"),
    ] = Field(description="the id of an uploaded VNN-LIB file, or several")

    @property
    def files(self) -> tuple[tuple[str, FileId], ...]:
        """Return each file under the path of its field."""
        if isinstance(self.vnnlib, str):
            return (("property.vnnlib", self.vnnlib),)
        return tuple((f"property.vnnlib.{index}", file) for index, file in enumerate(self.vnnlib))


class InstancesProperty(Strict):
    """Pairs of models and queries: ``instances.csv``, ONNX and VNN-LIB files in a zip or an uncompressed tar.

    A row is ``MODEL,QUERY`` or ``MODEL,QUERY,SECONDS`` with paths from its folder, at which files may also be
    compressed by gzip, and seconds of search in place of ``budget.seconds``. Each row is an instance.
    """

    instances: FileId = Field(
        description="the id of an uploaded archive with models, queries and instances.csv, as VNN-COMP has them"
    )


class RobustnessProperty(Strict):
    robustness: Robustness = Field(description="whether no small change of a sample changes its class")


class BoxProperty(Strict):
    box: Box = Field(description="bounds of the outputs on one box of inputs")


def _property_form(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return next((name for name in ("robustness", "box", "vnnlib", "instances") if name in keys), None)


Property = Annotated[
    Annotated[RobustnessProperty, Tag("robustness")]
    | Annotated[BoxProperty, Tag("box")]
    | Annotated[VnnlibProperty, Tag("vnnlib")]
    | Annotated[InstancesProperty, Tag("instances")],
    Discriminator(
        _property_form,
        custom_error_type="property_form",
        custom_error_message="a property is {robustness: {…}}, {box: {…}}, {vnnlib: FILE} or {instances: FILE}",
    ),
]


def _model_form(value: Any) -> str:
    is_onnx = "onnx" in value if isinstance(value, dict) else isinstance(value, FromOnnx)
    return "onnx" if is_onnx else "reference"


_VerifiedModel = Annotated[
    Annotated[FromOnnx, Tag("onnx")] | Annotated[ModelRef, Tag("reference")], Discriminator(_model_form)
]


ATTACK_RESTARTS = 64
"""Starts of an attack if the budget names none."""


SECONDS, SECONDS_OF_BOUNDS = 60.0, 600.0
"""Seconds for an instance if the budget names none: with search, and with bounds only."""


class VerifyBudget(Strict):
    """Limits the effort; a method ignores limits that it has no use for."""

    batch: int = Field(64, ge=1, description="instances bounded together")
    iterations: int = Field(
        20,
        ge=1,
        le=10**5,
        description="iterations of the optimisation of slopes; a search over activations takes three times as many "
        "for a whole box, and a quarter for each domain that it splits off",
    )
    seconds: float | None = Field(
        None,
        gt=0,
        le=10**6,
        description="seconds of an instance, from the start of its bounds to its row; when absent, "
        f"{SECONDS:g} if it may be searched, after which its verdict is timeout, and "
        f"{SECONDS_OF_BOUNDS:g} for bounds alone, after which it gets interval bounds, as its reason says",
    )
    domains: int = Field(
        10**9,
        ge=1,
        le=10**9,
        description="subdomains of an instance that a search may bound; left alone, its seconds end it long before",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        le=10**6,
        description="GiB of memory for each rank: on a CUDA device torch's allocations, on a CPU the whole process; "
        "all free memory when absent",
    )
    replays: int = Field(
        100,
        ge=0,
        le=10**6,
        description="inputs of a verified instance at which its ONNX file is run by onnxruntime before the row is "
        "published: a violation is an error of Trivet's and fails the job; they take a tenth of its seconds at most. "
        "0: none",
    )
    restarts: int = Field(ATTACK_RESTARTS, ge=0, le=10**6, description="starts of the attack before a search; 0: none")


class VerifySpec(CommonSpec):
    """Certify ``property`` of ``model`` with bound propagation."""

    kind: Literal["verify"] = Field("verify", description="a verification")
    model: _VerifiedModel | None = Field(None, description="the model; property.instances brings its own")
    property: Property = Field(description="the property to certify")
    method: Literal["ibp", "crown-ibp", "crown", "alpha-crown", "beta-crown"] = Field(
        "crown",
        description="method of the bounds; beta-crown searches for a verdict, and so does every method for a VNN-LIB "
        "query",
    )
    intermediate: Literal["optimised", "fixed"] = Field(
        "optimised", description="whether alpha-crown optimises the bounds of hidden layers too"
    )
    rigorous: bool = Field(
        False,
        description="whether bounds account for every rounding of their computation, so that they hold in real "
        "arithmetic; a search then uses no others",
    )
    budget: VerifyBudget = VerifyBudget()

    def searches(self) -> bool:
        """Return whether instances that bounds leave open are searched."""
        return isinstance(self.property, VnnlibProperty | InstancesProperty) or self.method == "beta-crown"

    def dependencies(self) -> tuple[Dependency, ...]:
        """Return the model's job, and those of ``after``."""
        return (*jobs_of(self.model), *super().dependencies())

    @model_validator(mode="after")
    def _has_models(self) -> VerifySpec:
        brought = isinstance(self.property, InstancesProperty)
        if brought and self.model is not None:
            message = "the models of property.instances are in its archive"
            raise disagreement("model", message, self.model.model_dump(mode="json"), "none")
        if not brought and self.model is None:
            raise disagreement("model", "none is given", None, "one, or property.instances, which brings models")
        return self

    @model_validator(mode="after")
    def _optimises(self) -> VerifySpec:
        if self.intermediate == "fixed" and self.method != "alpha-crown":
            message = f"method={self.method} has no bounds that could be fixed instead of optimised"
            raise disagreement("intermediate", message, "fixed", "optimised, or method=alpha-crown")
        return self
