"""Judges the output of the training scripts of ``cases.py``: each function returns its fault, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Judge = Callable[[str], str]


def _numbers(line: str) -> list[float]:
    return [float(each) for each in re.findall(r"'(-?[\d.]+)'", line)]


def tied(output: str) -> str:
    """Losses and norms on each layout, and exports, are those of one table."""
    found = [_numbers(line) for line in output.splitlines() if line.strip().startswith("trivet")]
    right = [_numbers(line) for line in output.splitlines() if line.strip().startswith("tied ref")]
    if len(found) != 3:
        return f"{len(found)} of 3 layouts trained: {output[-160:]}"
    apart = max(abs(a - b) for one, other in zip(found, right, strict=True) for a, b in zip(one, other, strict=True))
    exported = output.count("tie_word_embeddings True")
    return "" if apart < 2e-3 and exported == 3 else f"{apart:.2g} from the reference, {exported} of 3 exports tied"


def never_failed(output: str) -> str:
    """Accepted jobs succeed."""
    failed = [line for line in output.splitlines() if re.match(r".{24} failed ", line)]
    return failed[0][:160] if failed else ""


def finite(output: str) -> str:
    """No checkpoint has broken weights, nothing ends in torch's words, and no NaN in *succeeded*."""
    broken = re.search(r"non-finite entries: [1-9]", output)
    words = "cannot be converted to type" in output
    silent = re.search(r"--- [ad]: [^:]*: succeeded", output) or re.search(
        r"succeeded .*'eval_loss': (None|nan)", output
    )
    return " and ".join(
        text
        for is_so, text in ((broken, "broken weights kept"), (words, "torch's words"), (silent, "succeeded with NaN"))
        if is_so
    )


def advice(output: str) -> str:
    """A checkpoint of the failed job can be named, or there is none and the refusal says so; a retry with changes is
    refused or done.
    """
    jobs = re.findall(r"(?:lower rate|naming the step): (?:job_|422 .* has failed and left no checkpoint)", output)
    retried = re.search(r"retry with another rate: (\d+) -> spec lr (\S+)", output)
    ignored = retried is not None and retried[1] == "202" and float(retried[2]) != 1e-5
    return "the change was ignored" if ignored else "" if len(jobs) == 2 else f"{len(jobs)} of 2 answers are of use"


def cancelled(output: str) -> str:
    """Every job is cancelled, without a rank or a zombie left; one that was faster than its script has ended."""
    lines = [line for line in output.splitlines() if "; had " in line]
    if len(lines) != 4:
        return f"{len(lines)} of 4 jobs: {output[-160:]}"
    ended = (" cancelled in ", " succeeded in 0.0 s")
    wrong = [
        line for line in lines if not any(each in line for each in ended) or "True)" in line or "zombies []" not in line
    ]
    return wrong[0][:160] if wrong else ""


def evaluated(output: str) -> str:
    """The steps of evaluations after a kill are those without one."""
    lines = re.findall(r"events (\[[\d, ]*\]) parquet (\[[\d, ]*\])", output)
    right = [("[20, 40, 60, 80]",) * 2] * 2 + [("[20, 40]",) * 2]
    return "" if lines == right else f"{lines}"


def none_missing(output: str) -> str:
    return "" if "missing in events [] in parquet []" in output else output.strip()[-160:]


def found_by_name(output: str) -> str:
    lines = [line for line in output.splitlines() if " stored " in line]
    wrong = [line for line in lines if "False" in line]
    return wrong[0] if wrong else "" if lines else "no job was stored"


def full_disk(output: str) -> str:
    """The job fails because of the full disk, and continues when there is room."""
    before, _, after = output.partition("upload while full:")
    failed = re.search(r"failed .*(full|[Nn]o space)", before)
    return "" if failed and re.search(r"^\d+ succeeded", after, re.MULTILINE) else output.strip()[-160:]


def pictures(output: str) -> str:
    """Pictures are learned from as they are, or refused with both shapes."""
    stored, *others = output.splitlines()[-3:]
    first, *_, right = (each.split(" .. ")[0] for each in re.findall(r"[\d.]+ \.\. [\d.]+", stored)[:2])
    if abs(float(first) - float(right)) > 1e-5:
        return stored
    silent = [line for line in others if not re.search(r"(refused|failed) .*\(3, 6, 8\)|\(40, 6, 8, 3\)", line)]
    return silent[0] if silent else ""


def rotary(output: str) -> str:
    """A first loss is that of the right original length; what the transformer has not is refused."""
    right = [4.9864874, 4.9674027, 4.9864874, 4.9864874]
    lines = [line for line in output.splitlines() if " -> " in line]
    losses = [float(line.split("loss ")[1]) for line in lines[:4] if "loss " in line]
    if len(losses) < 4 or max(abs(one - other) for one, other in zip(losses, right, strict=True)) > 1e-5:
        return " ".join(lines[:4])[:160]
    return next((line[:160] for line in lines[4:] if "refused" not in line), "")


def repeated(output: str) -> str:
    """Equal runs are equal, resumed or not, with recomputation or without."""
    wrong = [line for line in output.splitlines() if "same: False" in line or "DIFFER" in line or " failed" in line]
    apart = [line for line in output.splitlines() if "max diff" in line and not line.endswith(" 0.0")]
    return (wrong + apart + [""])[0].strip() if "EQUAL" in output else output[-160:]


def counted(output: str) -> str:
    """Of each subject, every layout has the same losses, within those of float32, or is refused by the label."""
    lines = [line for line in output.splitlines() if line.startswith(("classes", "tokens ignored"))]
    for subject in ("classes", "tokens"):
        found = [[float(each) for each in re.findall(r"\d\.\d+", line)] for line in lines if line.startswith(subject)]
        if any("failed" in line and "-100" not in line for line in lines):
            return next(line for line in lines if "failed" in line)[:160]
        if any(abs(a - b) > 1e-5 for one in found for a, b in zip(one, found[0], strict=True)):
            return f"{subject}: {[each[0] for each in found]}"
    return ""


def ignored(output: str) -> str:
    losses = [float(each) for each in re.findall(r"succeeded \[([\d.]+)\]", output)]
    return "" if len(losses) == 2 and max(abs(each - 5.528141) for each in losses) < 1e-4 else output[-160:]


def weights(output: str) -> str:
    """A loss is the expected one; a file without one is refused, but for layers in their order."""
    for line in output.splitlines():
        given = re.search(r"loss ([\d.]+) expected ([\d.]+|None)", line)
        expected = given and given[2] != "None"
        if given and (abs(float(given[1]) - float(given[2])) > 1e-5 if expected else "fc1" not in line):
            return line[:160]
    return ""


def undamaged(output: str) -> str:
    """A damaged checkpoint is never resumed: the losses are those of a calm run, or it is refused."""
    lines = [line for line in output.splitlines() if " resume step " in line]
    wrong = [line for line in lines if "undisturbed run: False" in line]
    return wrong[0][:160] if wrong else "" if len(lines) == 12 else output[-160:]


def in_words(*raw: str) -> Judge:
    """Return the judge of an output that must have none of these."""
    return lambda output: next((word for word in raw if re.search(word, output)), "")


JUDGES: Mapping[tuple[str, str], Judge] = {
    ("T01-hwc-images", "run.py"): pictures,
    ("T02-rope-original-length", "run.py"): rotary,
    ("T03-dropout-seed-and-resume", "run.py"): repeated,
    ("T05-ignored-labels", "run.py"): counted,
    ("T05-ignored-labels", "run_b.py"): ignored,
    ("T07-extra-and-doubled-tensors", "run.py"): weights,
    ("T09-checkpoint-bit-flip", "run.py"): undamaged,
    ("T10-tokenizer-id-above-uint16", "run.py"): in_words("OverflowError"),
    ("T13-scalar-parameter-fsdp", "run.py"): in_words(
        "fully_shard doesn't", "RuntimeError", r"module says 0\).*e-0[1-4]"
    ),
    ("T14-test-targets-alone", "run.py"): in_words("test_targets alone +succeeded"),
    ("03-tied-embeddings", "run.py"): tied,
    ("07-sizes-that-do-not-divide", "run.py"): never_failed,
    ("09-nan", "run.py"): finite,
    ("09-nan", "run_last_step.py"): finite,
    ("09-nan", "run_last_step2.py"): finite,
    ("09-nan", "advice.py"): advice,
    ("12-cancel-kills-all", "run.py"): cancelled,
    ("13-evaluation-after-resume", "run_kill.py"): evaluated,
    ("13-evaluation-after-resume", "run_ctrl_c.py"): none_missing,
    ("14-unicode-names", "run.py"): found_by_name,
    ("18-disk-full", "run.sh"): full_disk,
}
