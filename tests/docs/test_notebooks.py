"""The notebooks work: every cell is executed by a kernel, beside a service, as a reader would."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from local_service import address, up

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


@pytest.mark.slow(30)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_does_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    data = tmp_path / "data"
    with up(data, TRIVET_WARM_SUPERVISORS="1") as process:
        address(process, data)
        for name in [name for name in os.environ if name.startswith("TRIVET_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("TRIVET_DATA", str(data))
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
        process.send_signal(signal.SIGTERM)
        process.wait(300)
    printed = "\n".join(str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "<svg" in printed
    assert "'verified'" in printed
