"""Memory that a step of a pass frees is there for the next one."""

from __future__ import annotations

import subprocess
import sys

ROUNDS, BLOCKS, BYTES = 20, 4, 2**22
PROGRAM = f"""
import ctypes, resource, sys
from service.bounds.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
for _ in range({ROUNDS}):
    blocks = [c.malloc(ctypes.c_size_t({BYTES})) for _ in range({BLOCKS})]
    for block in blocks:
        c.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t({BYTES}))
    for block in blocks:
        c.free(ctypes.c_void_p(block))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(how: str) -> int:
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(found.stdout)


def test_pages_are_not_asked_for_again() -> None:
    again = ROUNDS * BLOCKS * BYTES // 4096
    assert faults("given back") - faults("kept") > again / 2
