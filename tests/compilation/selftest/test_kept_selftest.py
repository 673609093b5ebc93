"""A self-test that held is kept for the next job on the host; one that did not is made again."""

from __future__ import annotations

from pathlib import Path

from service.compilation.selftest import Proof, SelfTest, kept_or_run

HELD = (Proof("parity", "wrong gradients", True, "off by"), Proof("none", "nothing", False, ""))
BLIND = (Proof("parity", "wrong gradients", False, ""),)


def never() -> tuple[Proof, ...]:
    raise AssertionError("the self-test ran again")


def test_what_held_is_kept_for_this_device(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert kept_or_run(lambda: HELD, folder, "cpu") == SelfTest(HELD)
    kept = kept_or_run(never, folder, "cpu")
    assert kept.proofs == HELD
    assert kept.kept_since
    assert kept_or_run(lambda: HELD[:1], folder, "cuda") == SelfTest(HELD[:1])


def test_what_did_not_hold_is_tried_again(tmp_path: Path) -> None:
    assert kept_or_run(lambda: BLIND, tmp_path, "cpu") == SelfTest(BLIND)
    assert kept_or_run(lambda: HELD, tmp_path, "cpu") == SelfTest(HELD)


def test_a_file_that_was_cut_off_or_changed_proves_nothing(tmp_path: Path) -> None:
    kept_or_run(lambda: HELD, tmp_path, "cpu")
    (path,) = tmp_path.glob("selftest-*.json")
    whole = path.read_text()
    for text in (whole[:40], "[]", whole.replace("true", "false")):
        path.write_text(text)
        assert kept_or_run(lambda: HELD, tmp_path, "cpu") == SelfTest(HELD)


def test_without_a_folder_it_runs_each_time() -> None:
    assert kept_or_run(lambda: HELD, None, "cpu") == kept_or_run(lambda: HELD, None, "cpu") == SelfTest(HELD)
