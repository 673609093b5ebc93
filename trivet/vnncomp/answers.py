"""Writes and reads results files: the verdict in the first line, and for ``sat`` a witness after it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from trivet.errors import TrivetError

CompetitionVerdict = Literal["sat", "unsat", "unknown", "timeout", "error"]
VERDICTS: tuple[CompetitionVerdict, ...] = get_args(CompetitionVerdict)
_ENTRY = re.compile(r"\(\s*([XY])_(\d+)\s+([^\s()]+)\s*\)\s*")


class WitnessFormatError(TrivetError):
    """The text is no witness; the message shows where it ceases to be one."""


@dataclass(frozen=True)
class Witness:
    """An input, and the outputs of the network there; both are flat, in C order."""

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]

    def text(self) -> str:
        """Return ``((X_0 v)`` … ``(Y_0 v) …)``, an entry on a line; each number reads back as the same float64."""
        named = (("X", self.inputs), ("Y", self.outputs))
        entries = [f"({name}_{index} {value!r})" for name, values in named for index, value in enumerate(values)]
        return "({})\n".format("\n".join(entries))

    @classmethod
    def parse(cls, text: str) -> Witness:
        """Read a witness; raises :class:`WitnessFormatError`. Inputs and outputs are numbered from 0 in order."""
        stripped, found = text.strip(), {"X": list[float](), "Y": list[float]()}
        if not (stripped.startswith("(") and stripped.endswith(")")):
            raise WitnessFormatError(f"a witness is ((X_0 v) … (Y_0 v) …), got {stripped[:60]!r}")
        place, end = len(stripped) - len(stripped[1:].lstrip()), len(stripped) - 1
        while place < end:
            entry = _ENTRY.match(stripped, place)
            if entry is None or int(entry[2]) != len(found[entry[1]]):
                names = " or ".join(f"({name}_{len(values)} v)" for name, values in found.items())
                raise WitnessFormatError(f"got {stripped[place : place + 60]!r} in a witness, expected {names}")
            found[entry[1]].append(_number(entry[3]))
            place = entry.end()
        return cls(tuple(found["X"]), tuple(found["Y"]))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise WitnessFormatError(f"got {text[:60]!r} in a witness, expected a number") from None


@dataclass(frozen=True)
class Decided:
    """The answer to an instance: ``sat`` has a witness, and ``reason`` says why another one is not ``unsat``."""

    verdict: CompetitionVerdict
    witness: Witness | None = None
    reason: str = ""

    def text(self) -> str:
        """Return the content of a results file."""
        return f"{self.verdict}\n{'' if self.witness is None else self.witness.text()}"


def verdict_of(word: str) -> CompetitionVerdict:
    """Return the verdict of a recorded result, which other tools write in several ways; unknown for any other."""
    word = word.strip().lower().removeprefix("run_instance_").removeprefix("prepare_instance_")
    word = {"holds": "unsat", "violated": "sat"}.get(word, word)
    return next((each for each in VERDICTS if word.startswith(each)), "unknown")
