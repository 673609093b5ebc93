"""``python -m workers.rank``."""

from service.linux import leave
from workers.rank.program import main

if __name__ == "__main__":
    # Without finalising the interpreter: threads of gloo that outlive their group may abort it.
    leave(main())
