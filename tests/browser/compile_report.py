"""A compile job's report in which every part of its page has something to show."""

from __future__ import annotations

from typing import Any

WORST = {
    "kind": "gradient",
    "name": "layers.0.weight",
    "iteration": 2,
    "excess": 41.0,
    "max_abs": 0.017,
    "ratio": 9.5,
}
SAFE: dict[str, Any] = {
    "rung": "eager",
    "phase": "train",
    "verdict": "pass",
    "findings": [],
    "graph_breaks": [],
    "recompiles": [],
}
COMPARED = {
    "findings": [{"verdict": "fail_parity", "message": "gradients are too far from float64"}],
    "parity": {
        "compared": 40,
        "judged_by": "float64",
        "note": "",
        "worst": {"gradient": WORST},
        "failed": [WORST],
    },
}
CAPTURED = {
    "graph_breaks": [{"reason": "Tensor.item()", "file": "model.py", "line": 118, "function": "forward", "count": 2}],
    "recompiles": None,
    "cudagraph": {
        "captures": 3,
        "launches_per_step": 2.0,
        "skips": [{"reason": "mutated inputs", "count": 2}],
        "rerecords": [],
        "late": [],
        "errors": [],
    },
}
CALLED = {
    "invocations": [
        {
            "module": "scorer",
            "phase": "train",
            "grad": True,
            "thread": "MainThread",
            "shape": "[8, 4]",
            "calls": 12,
            "per_step": 3.0,
        }
    ],
    "lifetimes": [
        {
            "module": "scorer",
            "step": 2,
            "site": "search.py:40 in choose",
            "shape": [8],
            "dtype": "torch.float32",
            "holders": ["Search.scores"],
        }
    ],
}
COST = {
    "profile": {"compiled_share": 0.8, "enqueue_ms": 1.2, "launches": 40.0, "graph_launches": 2.0, "busy_ms": 1},
    "eager_profile": None,
    "compile_s": {"cold": 38.4, "warm": 3.2},
    "step_ms": 2.0,
    "eager_step_ms": 4.125,
    "ratio": 0.5,
    "noisy": True,
}
FAILED: dict[str, Any] = {
    "rung": "inductor",
    "phase": "train",
    "verdict": "fail_parity",
    **COMPARED,
    **CAPTURED,
    **CALLED,
    **COST,
}
DIAGNOSIS: dict[str, Any] = {
    "rung": "inductor",
    "phase": "train",
    "module": "model.blocks.1",
    "fault": "gradient layers.0.weight, iteration 0: off by 0.017",
    "trace": "diagnosis/train-inductor/trace",
    "reproduction": {
        "script": "diagnosis/train-inductor/reproduction.py",
        "operators": 2,
        "confirmed": True,
        "said": "result 0 is off by 0.02",
        "bisection": "lowerings",
    },
}
GATE: dict[str, Any] = {
    "train": None,
    "inference": None,
    "fingerprint": {"torch": "2.13.0"},
    "worth": {"train": {"worth_it": False, "ratio": None, "noisy": None, "break_even_steps": None}},
}
REPORT: dict[str, Any] = {
    "summary": ["Training may be compiled with eager: inductor gave fail_parity."],
    "rungs": [SAFE, FAILED],
    "selftest": [
        {"detector": "parity", "fault": "gradients 5 % off", "fired": True, "holds": True, "message": ""},
        {"detector": "none", "fault": "nothing", "fired": True, "holds": False, "message": ""},
    ],
    "diagnoses": [DIAGNOSIS],
    "gate": GATE,
}
