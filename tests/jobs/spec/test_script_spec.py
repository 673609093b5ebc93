"""What the spec of a script says of ranks, arguments and paths."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from service.jobs.spec.script import ScriptSpec

GIVEN: dict[str, Any] = {"archive": "file_" + "0a" * 32, "entry": "src/train.py"}


def test_ranks_are_replicas_and_numbers_are_words_of_the_command_line() -> None:
    spec = ScriptSpec.model_validate({**GIVEN, "ranks": 2, "args": ["--epochs", 3, 0.5]})
    assert spec.parallel.world_size == 2
    assert spec.args == ["--epochs", "3", "0.5"]
    assert ScriptSpec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec
    assert ScriptSpec.model_validate({**spec.model_dump(exclude_unset=True), "ranks": 4}).parallel.world_size == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entry": "../train.py"}, "expected a path within the archive"),
        ({"entry": "/train.py"}, "expected a path within the archive"),
        ({"entry": "train.sh"}, "should match pattern"),
        ({"keep": ["../*"]}, "expected a path within the archive"),
        ({"args": ["a\0b"]}, "should match pattern"),
        ({"parallel": {"tp": 2}}, "parallel: a script divides its work itself, and has ranks: 1; expected ranks: 2"),
        (
            {"ranks": 2, "parallel": {"dp_replicate": 4}},
            "parallel: .* has ranks: 2; expected ranks: 4, and no parallel",
        ),
        ({"max_hosts": 2}, "max_hosts: a script has no network"),
        ({"seed": 1}, "seed: a script seeds itself"),
    ],
)
def test_what_a_script_cannot_have_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ScriptSpec.model_validate(GIVEN | changes)
