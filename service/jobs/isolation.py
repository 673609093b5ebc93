"""What a host may do to keep the ranks of a job from itself and from other jobs."""

from __future__ import annotations

from types import MappingProxyType

PARTS = MappingProxyType(
    {
        "limits": "limits on memory, file size, open files and core dumps; no new privileges",
        "files": "ranks open the files of their own job only (Landlock)",
        "network": "a job on one host has a network of its own (namespaces)",
        "broker": "ranks do not see the broker's socket (namespaces)",
    }
)
"""The first always holds, the others where the host allows them."""
