"""``python -m workers.agent.health``: exit code 0 while the worker of this host, by its settings, is heard of."""

from __future__ import annotations

import sys

from service.jobs.settings import Settings
from service.jobs.store import Store, StoreUnavailable


def main() -> int:
    """Return 0 when the fleet has heard of this host within ``heartbeat_s``; else say what is wrong and return 1."""
    settings = Settings()
    store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    try:
        if any(host.alive and host.name == settings.worker_name for host in store.hosts.list()):
            return 0
        reason = f"host {settings.worker_name} has not been heard of for {settings.heartbeat_s:g} s"
    except StoreUnavailable as error:
        reason = str(error)
    finally:
        store.close()
    print(reason, file=sys.stderr)  # noqa: T201 - for whoever asks how the container is
    return 1


if __name__ == "__main__":
    sys.exit(main())
