"""What can be asked for, from a terminal."""

from __future__ import annotations

from cli_world import Cli

from service.jobs.plugins.catalogue import house_version


def test_kinds_lists_what_specs_can_name(trivet: Cli) -> None:
    listed = trivet.ok("kinds").out
    for name in ("train", "verify", "compile", "convnet", "digits", "certified", f"trivet {house_version()}"):
        assert name in listed
    assert "Train a model, or an installed program, which brings its own data and optimizer," in listed
    assert "`" not in listed
    given = trivet.ok("kinds", "--json").json
    assert [each["name"] for each in given["objectives"]][:2] == ["cross_entropy", "certified"]
    assert "eps" in given["objectives"][1]["schema"]["properties"]
    assert given["unavailable"] == []
