"""The real supervisor, which waits forever for its own end once one of its ranks was killed, and leaves a file then."""

import asyncio
import os
import sys
from pathlib import Path

from workers.supervisor import attempt
from workers.supervisor.program import main
from workers.supervisor.settings import SupervisorSettings


async def _wait(settings: SupervisorSettings) -> None:
    Path(os.environ["TEST_SETTLES"]).touch()
    await asyncio.Event().wait()


if __name__ == "__main__":
    attempt.let_a_killer_finish = _wait  # type: ignore[attr-defined]
    sys.exit(main((str(Path(__file__).with_name("fake_rank.py")),)))
