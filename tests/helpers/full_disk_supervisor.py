"""The real supervisor where there is no room for what ranks print."""

import sys
from pathlib import Path
from typing import BinaryIO

from service.jobs.files import Folder
from workers.supervisor.program import main

_append = Folder.append


def _append_or_fail(self: Folder, name: str) -> BinaryIO:
    file = _append(self, name)
    if not name.startswith("log."):
        return file
    file.close()
    return Path("/dev/full").open("ab", buffering=0)


if __name__ == "__main__":
    Folder.append = _append_or_fail  # type: ignore[method-assign]
    sys.exit(main((str(Path(__file__).with_name("fake_rank.py")),)))
