"""Names what keeps the jobs of a host apart."""

from __future__ import annotations

from types import MappingProxyType

ISOLATION_PARTS = MappingProxyType(
    {
        "limits": "limits on memory, file size, open files and core dumps; no new privileges",
        "files": "ranks open the files of their own job only (Landlock)",
        "network": "a job on one host has a network of its own (namespaces)",
        "broker": "ranks do not see the broker's socket (namespaces)",
        "memory": "shared memory is a job's own, has a limit and ends with it (namespaces, Linux 6.10)",
    }
)
"""The first always holds; the others hold if the host allows them."""
