"""The client for coroutines makes the calls of the other one, many at a time."""

from __future__ import annotations

import asyncio
import csv
import io
from typing import Any

import pyarrow as pa
import pytest
from cli_world import TRAIN, Cli, Worker
from pyarrow import csv as pa_csv

from trivet import AsyncClient, Client, Refused, tables


def test_coroutines_submit_wait_and_follow_together(url: str, secret: str, worker: Worker) -> None:
    async def work() -> tuple[list[str], list[int]]:
        async with AsyncClient(url, secret) as client:
            assert (await client.check(TRAIN))["jobs"] == 1
            with pytest.raises(Refused, match="Invalid spec"):
                await client.check({**TRAIN, "steps": 0})
            many = await client.submit_many([{**TRAIN, "name": f"job {index}"} for index in range(20)])
            ids = [job.id for job in many]
            assert [job.id async for job in client.jobs()] == ids[::-1]
            waiting = [asyncio.create_task(client.wait(job_id)) for job_id in ids]
            followed = asyncio.create_task(steps(client, ids[0]))
            for job_id in ids:
                await asyncio.to_thread(run, worker, job_id, loss=0.5)
            return [job.state for job in await asyncio.gather(*waiting)], await followed

    states, told = asyncio.run(work())
    assert states == ["succeeded"] * 20
    assert told == [1]


def run(worker: Worker, job_id: str, **result: Any) -> None:
    """Run the job that is next, with one metric, to its result."""
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "metric", "step": 1, "values": {"loss": 0.5}}])
    worker.end(ref, **result)


async def steps(client: AsyncClient, job_id: str) -> list[int]:
    return [event["step"] async for event in client.follow(job_id, types=["metric"]) if event["type"] == "metric"]


def test_results_are_tables(url: str, secret: str, worker: Worker) -> None:
    with Client(url, secret) as client:
        ids = [client.submit({**TRAIN, "labels": {"team": "a"}, "seed": seed}).id for seed in range(3)]
        for job_id, loss in zip(ids, (1, 0.5, 0.25), strict=True):
            mixed = loss if loss == 1 else "text"
            run(worker, job_id, loss=loss, verdicts={"verified": 3}, mixed=mixed)
        client.wait_many(ids, timeout_s=300)
        table = tables.jobs(client.jobs(label="team=a"))
        assert table.column("result.loss").to_pylist() == [0.25, 0.5, 1.0]
        assert table.column("result.verdicts.verified").to_pylist() == [3, 3, 3]
        assert table.column("result.mixed").to_pylist() == ['"text"', '"text"', "1"]
        assert set(table.column("labels.team").to_pylist()) == {"a"}
        curve = tables.metrics(client.metrics(ids[0]))
        assert (curve.column("metric").to_pylist(), curve.column("value").to_pylist()) == (["loss"], [0.5])
    found = tables.bounds([{"instance": 0, "lower": [0.5], "at": {"x": 1}}, {"instance": 1, "lower": None}])
    assert found.column("lower").to_pylist() == ["[0.5]", None]
    assert found.column("at.x").to_pylist() == [1, None]
    for each in (table, curve, found):
        pa_csv.write_csv(each, pa.BufferOutputStream())


def test_csv_has_a_line_for_each_row_that_reads_back(trivet: Cli, worker: Worker, client: Client) -> None:
    ids = [client.submit({**TRAIN, "seed": seed, "name": f'one,"{seed}"'}).id for seed in range(2)]
    for job_id in ids:
        run(worker, job_id, loss=0.5, layers=[{"width": 1}])

    def read(*words: str) -> list[dict[str, str]]:
        text = trivet.ok(*words, "--csv").out
        assert pa_csv.read_csv(io.BytesIO(text.encode())).num_rows == len(text.splitlines()) - 1
        return list(csv.DictReader(io.StringIO(text)))

    (last, first) = read("jobs")
    assert [last["id"], first["id"]] == ids[::-1]
    assert (first["name"], first["result.loss"], first["result.layers"]) == ('one,"0"', "0.5", '[{"width":1}]')
    assert (first["computed_by.torch"], first["computed_by.threads"], first["computed_by.host"]) == (
        "2.13.0",
        "2",
        "fake",
    )
    assert "attempt 1: fake, cpu, threads 2, torch 2.13.0" in trivet.ok("show", ids[0]).out
    assert read("metrics", ids[0])[0]["metric"] == "loss"
    assert [(row["id"], row["seed"], row["result.loss"]) for row in read("compare", *ids)] == [
        (ids[0], "0", "0.5"), (ids[1], "1", "0.5")
    ]  # fmt: skip
    table = trivet.ok("compare", *ids)
    assert table.out.splitlines()[0].split() == ["id", "name", "seed"]  # all else is alike, or a list
    assert "more columns are alike in all jobs, or lists: --csv has them" in table.err
    assert "seed" not in trivet.ok("compare", ids[0], ids[0]).out
    refused = trivet("bounds", ids[0], "--csv")
    assert (refused.code, refused.out) == (2, "")
    assert "a train job has no bounds" in refused.err
