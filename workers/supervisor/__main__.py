"""``python -m workers.supervisor``."""

import sys

from workers.supervisor.program import main

if __name__ == "__main__":
    sys.exit(main())
