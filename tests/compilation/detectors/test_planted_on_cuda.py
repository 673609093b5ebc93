"""What the rehearsal says of a program holds where CUDA graphs do replay. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from programs import keeping, storing
from programs.registry import CLEAN, DEFECTS, Planted
from set_aside import nothing_set_aside

from service.compilation.detectors import judge
from service.compilation.run.baseline import make_baseline
from service.compilation.run.observation import RungCase
from service.compilation.run.observe_rung import observe_rung_untimed
from service.compilation.run.run_plan import plan_run
from service.compilation.rungs import RUNGS
from service.compilation.verdicts import Finding
from service.jobs.spec.compile import Tolerance

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU"),
]
COPIES = tuple(Planted(keeping.keeping(name, way), "inference") for name, way in keeping.COPIES.items())
ALIASES = tuple(Planted(keeping.keeping(name, way), "inference") for name, way in keeping.ALIASES.items())


def name_of(planted: Planted) -> str:
    return f"{planted.name} {planted.make.__name__}"


def findings(planted: Planted) -> tuple[Finding, ...]:
    """What speaks against the program under CUDA graphs; nothing is timed."""
    program = planted.program(torch.device("cuda", 0))
    plan = plan_run(program, 6, Tolerance(), lambda seconds: seconds)
    baseline = make_baseline(program, planted.phase, plan.iterations)
    seen = observe_rung_untimed(program, RungCase(RUNGS["reduce-overhead"], planted.phase), baseline, plan)
    assert seen.evidence.cuda_graphs is not None
    # A graph is captured when its shapes come again: a program of new shapes in every step never gets there.
    assert seen.evidence.cuda_graphs.captures or seen.error or planted.verdict == "unstable"
    return judge(seen)


@pytest.mark.parametrize("planted", [*CLEAN, *COPIES, *storing.INNOCENT], ids=name_of)
def test_what_raises_no_alarm_in_the_rehearsal_passes(planted: Planted) -> None:
    assert findings(planted) == ()


@pytest.mark.parametrize("planted", [*DEFECTS, *ALIASES, *storing.DEFECTS], ids=name_of)
def test_what_is_found_in_the_rehearsal_fails(planted: Planted) -> None:
    assert {finding.verdict for finding in findings(planted)} & {planted.verdict, "fail_error", "fail_parity"}


@pytest.mark.parametrize("planted", storing.DEFECTS, ids=name_of)
def test_what_is_read_too_late_is_named_with_its_holder_and_the_line_that_reads_it(planted: Planted) -> None:
    with nothing_set_aside():
        found = findings(planted)
    messages = [finding.message for finding in found if finding.verdict == "fail_lifetime"]
    named = [message for message in messages if storing.read_by(planted) in message]
    # In the forward itself the line is that of the call: what compiled code reads is not seen.
    assert named or planted.make is storing.Recurrent, found
    assert any(storing.HOLDERS[planted.name][0] in message for message in messages), found
