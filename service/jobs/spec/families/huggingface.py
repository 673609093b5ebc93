"""Defines the models that the package transformers builds of a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from service.jobs.plugins import Features, Reason, Samples, Tokens, disagreement
from service.jobs.spec.common import ParallelSpec, Recorded
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
_OF_LOSSES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "output_router_logits": ((False, None), "a loss of its own balances experts, which no objective here has"),
    "problem_type": (("single_label_classification", None), "the objective is the cross entropy of one label"),
}
"""Fields that choose a loss of the package's own, by the values that choose none."""
HEADS = ("num_attention_heads", "num_key_value_heads")
_SIZES = ("intermediate_size", "vocab_size")
WHOLE_HEADS = ("olmo2", "olmo3", "phi3")
DIVIDED = (
    *("arcee", "codegen", "cohere", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2"),
    *(
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_neox",
        "gptj",
        "granite",
        "helium",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
    ),
    *("llama", "ministral", "ministral3", "mistral", "nanochat", "nemotron", "olmo", "phi", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "starcoder2", "vaultgemma", *WHOLE_HEADS),
)
"""Types whose own plan divides them over tensor-parallel ranks such that these compute what one process does, as
``benchmarks/families.py`` shows; of ``WHOLE_HEADS`` each rank has all heads.
"""


def drop_rates(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates of dropout in a configuration, by field, that are not 0."""
    rates = {name: value for name, value in fields.items() if "drop" in name and "classifier" not in name}
    return {name: rate for name, rate in rates.items() if isinstance(rate, int | float) and rate}


class HuggingfaceConfig(PackagedConfig):
    """A model of the package transformers, of the fields of a ``config.json``: ``{family: huggingface, config: {…}}``.

    Fields that ``config`` leaves out have the package's defaults; ``vocab_size`` and ``num_labels`` must be there where
    they decide which data fits.
    """

    family: Literal["huggingface"] = Field(
        "huggingface", description="a model of the package transformers, of a configuration"
    )
    config: dict[Annotated[str, StringConstraints(min_length=1, max_length=100)], Recorded] = Field(
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

    @property
    def divided(self) -> Mapping[str, int]:
        if self.task != "causal-lm" or self.model_type not in DIVIDED:
            return {}
        names = _SIZES if self.model_type in WHOLE_HEADS else (*HEADS, *_SIZES)
        return {f"config.{name}": size for name in names if isinstance(size := self.config.get(name), int)}

    def check_parallel(self, parallel: ParallelSpec, stages: int) -> list[Reason]:
        problems = super().check_parallel(parallel, stages)
        if parallel.tp > 1 and not self.divided:
            message = f"no plan is known to divide {self.model_type} for {self.task} over tensor-parallel ranks"
            expected = f"1, or config.model_type {', '.join(sorted(DIVIDED))}"
            problems = [each for each in problems if each[0] != "parallel.tp"]
            problems.append(("parallel.tp", message, parallel.tp, expected))
        elif parallel.tp > 1:
            message = "tensor-parallel ranks draw apart from one process"
            problems += [(f"model.config.{name}", message, rate, "0") for name, rate in drop_rates(self.config).items()]
        return problems

    @model_validator(mode="after")
    def _is_a_description(self) -> HuggingfaceConfig:
        check_keys(self.config, _REFUSED, "config")
        if len(json.dumps(self.config, default=str)) > _MOST_BYTES:
            raise disagreement("config", "it is longer than a configuration", "…", f"at most {_MOST_BYTES} bytes")
        for name, (without, reason) in _OF_LOSSES.items():
            if self.config.get(name) not in without:
                expected = " or ".join("null" if each is None else str(each).lower() for each in without)
                raise disagreement(f"config.{name}", reason, self.config[name], expected)
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
