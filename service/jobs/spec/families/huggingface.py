"""Defines the models that the package transformers builds of a configuration."""

from __future__ import annotations

import json
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from service.jobs.plugins import Features, Samples, Tokens, disagreement
from service.jobs.spec.families.packaged import PackagedConfig, check_keys

_Size = Annotated[int, Field(ge=1, le=2**16)]
_MOST_BYTES = 2**16
_CODE = "code, and a spec holds none"
_REFUSED = {
    "auto_map": _CODE,
    "trust_remote_code": _CODE,
    "code_revision": _CODE,
    "custom_pipelines": _CODE,
    "attn_implementation": "a choice of kernels, which may be fetched from elsewhere",
    "experts_implementation": "a choice of kernels, which may be fetched from elsewhere",
    "quantization_config": "about weights that are stored in fewer bits, which do not learn",
    "backbone": "a model of another place",
    "use_timm_backbone": "a model of another place",
    "use_pretrained_backbone": "about weights from elsewhere",
}


class HuggingfaceConfig(PackagedConfig):
    """A model of the package transformers, of the fields of a ``config.json``: ``{family: huggingface, config: {…}}``.

    Fields that ``config`` leaves out have the package's defaults; ``vocab_size`` and ``num_labels`` must be there where
    they decide which data fits.
    """

    family: Literal["huggingface"] = Field(
        "huggingface", description="a model of the package transformers, of a configuration"
    )
    config: dict[Annotated[str, StringConstraints(min_length=1, max_length=100)], Any] = Field(
        description="the fields of a config.json: model_type, vocab_size and others of that type"
    )
    task: Literal["causal-lm", "image-classification"] = Field(
        "causal-lm", description="what the outputs are: the next token at each place, or classes of a picture"
    )
    sequence: int | None = Field(
        None, ge=1, le=2**24, description="the most tokens of a sample, for causal-lm: what the type's positions allow"
    )
    image: tuple[_Size, _Size, _Size] | None = Field(
        None, description="channels, height and width of a picture, for image-classification"
    )

    @property
    def package(self) -> str:
        return "transformers"

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def reads(self) -> Samples:
        if self.task == "causal-lm":
            return Tokens(int(self.config["vocab_size"]), self.sequence or 0, "config.vocab_size", "sequence")
        shape = self.image or ()
        return Features(prod(shape), int(self.config["num_labels"]), shape=shape, classes_field="config.num_labels")

    @model_validator(mode="after")
    def _is_a_description(self) -> HuggingfaceConfig:
        check_keys(self.config, _REFUSED, "config")
        if len(json.dumps(self.config, default=str)) > _MOST_BYTES:
            raise disagreement("config", "it is longer than a configuration", "…", f"at most {_MOST_BYTES} bytes")
        if not isinstance(self.config.get("model_type"), str):
            got = self.config.get("model_type")
            raise disagreement("config.model_type", "it says which model this is", got, "a type, such as gpt2")
        wanted, size = ("vocab_size", "sequence") if self.task == "causal-lm" else ("num_labels", "image")
        number = self.config.get(wanted)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise disagreement(f"config.{wanted}", f"task={self.task} needs it", number, "a whole number above 0")
        for field in ("sequence", "image"):
            if (getattr(self, field) is not None) != (field == size):
                expected = "a value" if field == size else "null"
                raise disagreement(field, f"task={self.task} reads {size}", getattr(self, field), expected)
        return self
