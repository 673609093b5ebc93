"""Memory that a step of a pass frees is there for the next one."""

from __future__ import annotations

import subprocess
import sys

ROUNDS, BLOCKS, BYTES = 20, 4, 2**22
PROGRAM = f"""
import ctypes, resource
from service.bounds.memory import keep_freed_memory

c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({ROUNDS}):
        blocks = [c.malloc(ctypes.c_size_t({BYTES})) for _ in range({BLOCKS})]
        for block in blocks:
            c.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t({BYTES}))
        for block in blocks:
            c.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
keep_freed_memory()
print(given_back, faults())
"""


def test_pages_are_not_asked_for_again() -> None:
    again = ROUNDS * BLOCKS * BYTES // 4096
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    given_back, kept = map(int, found.stdout.split())
    assert given_back - kept > again / 2
