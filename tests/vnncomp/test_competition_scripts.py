"""The three scripts of the competition and the score, as users start them, without a service."""

from __future__ import annotations

import csv
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from competition_instances import SATISFIED, VERSION_2, benchmark

from service.formats.vnnlib import parse
from trivet.vnncomp.instances import content
from trivet.vnncomp.questions import Question
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
    """Of version 1, and of version 2: the network is the same, and so is its trace."""
    network, query, newer = files
    prepared = ran(tmp_path, str(SCRIPTS / "prepare_instance.sh"), "v1", "tiny", network, query)
    assert prepared.returncode == 0, prepared.stderr
    assert list((tmp_path / "cache" / "trivet" / "traces").iterdir()) != []
    results = tmp_path / "results.txt"
    found = ran(tmp_path, str(SCRIPTS / "run_instance.sh"), "v1", "tiny", network, newer, str(results), "120")
    assert found.returncode == 0, found.stderr
    verdict, _, witness = results.read_text().partition("\n")
    assert verdict == "sat", found.stderr
    read = Question.read("tiny", {None: Path(network)}, Path(newer)).parse_witness(witness)
    again = replayed(ReplayedNetwork(content(Path(network))), parse(SATISFIED), read.inputs)
    assert (again.witness.inputs, again.witness.outputs) == (read.inputs, read.outputs)


def test_equal_networks_are_verified_by_the_standards_interface(tmp_path: Path, files: tuple[str, str, str]) -> None:
    network, _, newer = files
    query, other = tmp_path / "pair.vnnlib", VERSION_2.partition("\n")[2].partition("\n")[0]
    other = other.replace(" f ", " g (equal-to f) ").replace("X", "U").replace("Y", "V")
    same = "".join(f"(assert (== X[0,{index}] U[0,{index}]))" for index in range(5))
    text = content(Path(newer)).decode().replace("\n(assert", f"\n{other}\n{same}(assert", 1)
    query.write_text(f"{text}(assert (!= Y[0,1] V[0,1]))(assert (> Y[0,1] (+ V[0,1] 0.25)))")
    words = ("verify", str(query), "--network", f"f={network}", "--timeout", "60")
    found = ran(tmp_path, str(SCRIPTS.parent / "vnnlib" / "solver.sh"), *words)
    assert (found.returncode, found.stdout) == (0, "unsat\n"), found.stderr
    twice = ran(tmp_path, str(SCRIPTS.parent / "vnnlib" / "solver.sh"), *words, "--network", "f=other.onnx")
    assert "expected one file for each name" in " ".join(twice.stderr.split())


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
    refused = VERSION_2.replace("real [1, 5]", "int8 [1, 5]")
    Path(f"{files[2]}.gz").write_bytes(gzip.compress(refused.encode()))
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
    rows_of_results = (results / "results.csv").read_text().splitlines()
    assert len(rows_of_results) == 2
    assert "one of int8 is not supported" in rows_of_results[1]
    for given, told in (
        ("other=nowhere", "a file DIR/results.csv"),
        ("trivet=peer", "not trivet, which is this tool"),
        ("other=peer --peer other=peer", "a name of its own for each peer"),
    ):
        refused = ran(tmp_path, str(tmp_path / "trivet"), "vnncomp", "score", "tiny", "--peer", *given.split())
        assert told in " ".join(refused.stderr.split())
