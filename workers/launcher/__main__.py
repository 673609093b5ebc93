"""``python -m workers.launcher``."""

from service.linux import leave
from workers.launcher.program import main

if __name__ == "__main__":
    # The ranks have ended and nothing is held: unloading torch would only delay the report.
    leave(main())
