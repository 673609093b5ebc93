"""All programs of the corpus, by name."""

from __future__ import annotations

from collections import Counter

from benchmarks.compile_corpus.bugs import BUGS
from benchmarks.compile_corpus.programs import Entry
from benchmarks.compile_corpus.replays import WRONG
from benchmarks.compile_corpus.sound import SOUND

ALL: tuple[Entry, ...] = (*BUGS, *WRONG, *SOUND)
BY_NAME = {entry.name: entry for entry in ALL}
assert len(BY_NAME) == len(ALL), [name for name, count in Counter(each.name for each in ALL).items() if count > 1]
