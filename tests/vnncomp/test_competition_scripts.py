"""The three scripts of the competition and the score, as users start them, without a service."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from competition_instances import SATISFIED, VERSION_2, benchmark

from service.formats.vnnlib import parse
from trivet.vnncomp.answers import Witness
from trivet.vnncomp.instances import content
from trivet.vnncomp.witness import ReplayedNetwork, replayed

SCRIPTS = Path(__file__).parents[2] / "examples" / "vnncomp"


def ran(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET")}
    trivet = folder / "trivet"
    trivet.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trivet "$@"\n')
    trivet.chmod(0o700)
    own = {"TRIVET": str(trivet), "TRIVET_DATA": str(folder / "none"), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    return subprocess.run(
        words, env={**outer, **own, **variables}, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    home = benchmark(tmp_path / "tiny", {"met": (SATISFIED, 120.0), "new": (VERSION_2, 5.0)})
    return tuple(str(home / path) for path in ("onnx/net.onnx", "vnnlib/met.vnnlib", "vnnlib/new.vnnlib"))  # type: ignore[return-value]


def test_an_instance_is_prepared_and_run(tmp_path: Path, files: tuple[str, str, str]) -> None:
    network, query, _ = files
    prepared = ran(tmp_path, str(SCRIPTS / "prepare_instance.sh"), "v1", "tiny", network, query)
    assert prepared.returncode == 0, prepared.stderr
    assert list((tmp_path / "cache" / "trivet" / "traces").iterdir()) != []
    results = tmp_path / "results.txt"
    found = ran(tmp_path, str(SCRIPTS / "run_instance.sh"), "v1", "tiny", network, query, str(results), "120")
    assert found.returncode == 0, found.stderr
    verdict, _, witness = results.read_text().partition("\n")
    assert verdict == "sat", found.stderr
    read = Witness.parse(witness)
    again = replayed(ReplayedNetwork(content(Path(network))), parse(SATISFIED), read.inputs)
    assert again.witness == read


def test_vnnlib_2_is_refused_by_name(tmp_path: Path, files: tuple[str, str, str]) -> None:
    network, _, query = files
    prepared = ran(tmp_path, str(SCRIPTS / "prepare_instance.sh"), "v1", "tiny", network, query)
    assert prepared.returncode != 0
    assert "is VNN-LIB 2, which is not supported" in prepared.stderr
    results = tmp_path / "results.txt"
    found = ran(tmp_path, str(SCRIPTS / "run_instance.sh"), "v1", "tiny", network, query, str(results), "5")
    assert results.read_text() == "unknown\n"
    assert "is VNN-LIB 2, which is not supported" in found.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_another_version_of_the_interface_is_refused(tmp_path: Path, script: str) -> None:
    refused = ran(tmp_path, str(SCRIPTS / script), "v2")
    assert refused.returncode != 0
    assert "expected v1" in refused.stderr


def test_the_tool_is_installed_from_the_sources_of_the_scripts(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@"\n')
    make.chmod(0o700)
    found = ran(tmp_path, str(SCRIPTS / "install_tool.sh"), "v1", MAKE=str(make))
    assert found.stdout == f"-C {SCRIPTS.parents[1]} .venv/.installed\n"


def test_a_score_beside_a_peers(tmp_path: Path, files: tuple[str, str, str]) -> None:
    """All rows are there but that of a query which is answered without a search."""
    results, peer = tmp_path / "mine", tmp_path / "peer"
    for folder, verdict in ((results, "unsat"), (peer, "sat")):
        folder.mkdir()
        (folder / "results.csv").write_text(f"tiny,onnx/net.onnx,vnnlib/met.vnnlib,0,{verdict},1.5\n")
    (peer / "tiny").mkdir()
    (tmp_path / "tiny" / "labels.csv").write_text("onnx,vnnlib,label\nonnx/net.onnx,vnnlib/met.vnnlib,sat\n")
    words = ("vnncomp", "score", "tiny", "--into", "mine", "--peer", "other=peer")
    found = ran(tmp_path, str(tmp_path / "trivet"), *words)
    assert found.returncode == 1, found.stderr
    assert "wrong: tiny onnx/net.onnx vnnlib/met.vnnlib" in found.stderr
    with (results / "score.csv").open() as file:
        rows = {(row["category"], row["tool"]): row for row in csv.DictReader(file)}
    assert {tool: rows["tiny", tool]["points"] for tool in ("trivet", "other")} == {"trivet": "-150", "other": "10"}
    assert rows["all", "other"]["score"] == "100.0"
    assert len((results / "results.csv").read_text().splitlines()) == 2
    refused = ran(tmp_path, str(tmp_path / "trivet"), "vnncomp", "score", "tiny", "--peer", "other=nowhere")
    assert "expected NAME=DIR, and a file DIR/results.csv" in refused.stderr
