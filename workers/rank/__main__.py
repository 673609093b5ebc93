"""``python -m workers.rank``."""

import os
import sys

from workers.rank.program import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without finalising the interpreter: threads of gloo that outlive their group may abort it.
    os._exit(code)
