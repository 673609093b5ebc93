"""All programs of the corpus, by name."""

from __future__ import annotations

from collections import Counter

from benchmarks.compile_corpus import arithmetic, libraries, posted, replays, sound, written
from benchmarks.compile_corpus.bugs import COMPILER_BUGS
from benchmarks.compile_corpus.own_bugs import OWN_BUGS
from benchmarks.compile_corpus.programs import Entry

ALL: tuple[Entry, ...] = (
    *COMPILER_BUGS,
    *OWN_BUGS,
    *(entry for each in (replays, arithmetic, written, posted, libraries) for entry in each.WRONG),
    *(entry for each in (sound, written, posted, libraries) for entry in each.SOUND),
)
BY_NAME = {entry.name: entry for entry in ALL}
assert len(BY_NAME) == len(ALL), [name for name, count in Counter(each.name for each in ALL).items() if count > 1]
