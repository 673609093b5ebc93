"""The list of public names agrees with the code."""

from __future__ import annotations

import pytest

from docs.site.public import Names, kept_names, public_names, vanished


@pytest.fixture(scope="module")
def found() -> Names:
    return public_names()


def test_no_public_name_vanishes_and_each_new_one_is_in_the_list(found: Names) -> None:
    kept = kept_names()
    assert vanished(kept, found) == [], "users rely on these names: docs/use/public.md says how one goes"
    assert vanished(found, kept) == [], "new names: run `python docs/site/public.py`"


def test_each_room_of_the_list_notices_a_name_that_is_gone(found: Names) -> None:
    known = {
        "commands": "trivet submit --set",
        "events": "type metric",
        "plugins": "ModelConfig.reads",
        "python": "Client.submit(idempotency_key)",
        "rest": "Job.attempt: integer",
        "specs": "train.optimizer.lr",
    }
    less = {room: [name for name in names if name != known[room]] for room, names in found.items()}
    assert vanished(found, less) == [f"{room}: {name}" for room, name in known.items()]
