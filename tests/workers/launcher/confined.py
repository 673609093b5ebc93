"""Runs programs in confinement, for its tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from workers.launcher import confinement
from workers.launcher.confinement import Confinement

AVAILABLE = confinement.available()
needs_files = pytest.mark.skipif("files" not in AVAILABLE, reason="this kernel or container has no Landlock")
needs_namespaces = pytest.mark.skipif("broker" not in AVAILABLE, reason="this host forbids user namespaces")


def enforce(confined: Confinement, code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python ``code`` in a process that has confined itself, without the service around it."""
    script = (
        "import json, sys\n"
        "from workers.launcher import namespaces\n"
        "from workers.launcher.confinement import Confinement\n"
        "inside = namespaces.enter_user_namespace()\n"
        f"{before}"
        f"Confinement.from_json(json.loads({json.dumps(confined.to_json())!r})).enforce(in_user_namespace=inside)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script + code], capture_output=True, text=True, timeout=300, check=False
    )
