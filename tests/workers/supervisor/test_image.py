"""What has been imported is compared with what is on disk."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import eventually

from workers.supervisor import image as images
from workers.supervisor.image import ImportedImage


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that is not imported yet, on a search path of its own folder alone."""
    folder = tmp_path / "packages"
    folder.mkdir()
    file = folder / f"imported_by_{tmp_path.name.replace('-', '_')}.py"
    file.write_text("VALUE = 1\n")
    monkeypatch.setattr(sys, "path", [str(folder)])
    return file


@pytest.fixture(autouse=True)
def _no_generated_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor wrote and imported for earlier tests of this process changes after it: it is set aside."""
    for name, known in list(sys.modules.items()):
        if "/trivet-compile-" in (getattr(known, "__file__", None) or ""):
            monkeypatch.delitem(sys.modules, name)


def taken(module: Path) -> ImportedImage:
    """The image of this process with the module in it, which was not changed while it was imported."""
    eventually(lambda: time.clock_gettime_ns(images._CLOCK_OF_FILES) > module.stat().st_ctime_ns)
    image = ImportedImage.before_imports()
    importlib.import_module(module.stem)
    image.take()
    del sys.modules[module.stem]
    return image


def write_in_place(module: Path) -> None:
    module.write_text("VALUE = 2\n")


def replace(module: Path) -> None:
    """As a package manager does, with size and time of the old one."""
    new = module.with_suffix(".new")
    new.write_text("VALUE = 3\n")
    os.utime(new, ns=(module.stat().st_atime_ns, module.stat().st_mtime_ns))
    new.replace(module)


@pytest.mark.parametrize("kernel_tells", [True, False])
@pytest.mark.parametrize("change", [write_in_place, replace, Path.unlink])
def test_a_module_that_is_changed_replaced_or_removed_is_named(
    module: Path, change: Callable[[Path], None], kernel_tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_tells:
        monkeypatch.setattr(images, "_LOCAL_FILE_SYSTEMS", set())
    image = taken(module)
    assert image.change() == ""
    assert image.change() == ""
    change(module)
    assert image.change() == f"{module} was changed"


def test_a_package_that_is_installed_or_declares_another_plugin_is_a_change(module: Path) -> None:
    image = taken(module)
    (module.parent / "notes.txt").write_text("no package")
    assert image.change() == ""
    information = module.parent / "new-1.0.dist-info"
    information.mkdir()
    assert "packages were installed" in image.change()
    (information / "entry_points.txt").write_text("[trivet.kinds]\n")
    later = taken(module)
    assert later.change() == ""
    (information / "entry_points.txt").write_text("[trivet.kinds]\nnew = new:KIND\n")
    assert "packages were installed" in later.change()


def test_what_changes_while_it_is_imported_is_a_change(module: Path) -> None:
    """It may be in memory as it was before."""
    image = ImportedImage.before_imports()
    importlib.import_module(module.stem)
    write_in_place(module)
    image.take()
    del sys.modules[module.stem]
    assert image.change() == f"{module} was changed"


def test_files_are_looked_at_only_when_something_happened(tmp_path: Path) -> None:
    watch = images._Watch()
    watch.begin({str(tmp_path)})
    assert watch.has_news(), "nobody has looked since they were imported"
    assert not watch.has_news()
    (tmp_path / "new").touch()
    assert watch.has_news()
    assert watch.has_news(), "one look later than the news"
    assert not watch.has_news()
    assert images._Watch().has_news()
