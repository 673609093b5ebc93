"""``python -m workers.launcher``."""

import os
import sys

from workers.launcher.program import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The ranks have ended and nothing is held: unloading torch would only delay the report.
    os._exit(code)
