"""The real supervisor on a disk that hangs while there is a file ``hangs`` in the attempt's folder."""

import sys
import time
from pathlib import Path

from workers.supervisor.logs import GrowingFile
from workers.supervisor.program import main

_write = GrowingFile.write


def _write_once_it_may(self: GrowingFile) -> None:
    while (self._path.parent / "hangs").exists():
        time.sleep(0.05)
    _write(self)


if __name__ == "__main__":
    GrowingFile.write = _write_once_it_may  # type: ignore[method-assign]
    sys.exit(main((str(Path(__file__).with_name("fake_rank.py")),)))
