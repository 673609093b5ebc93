"""Take pictures of every page of the dashboard with real jobs, light and dark; and those that the documents show.

Starts a service of its own, runs jobs of every kind on it, and opens the pages in a browser. With ``--documents`` the
pictures of the README and the guides are made anew. A data folder that is kept has its jobs at the next call.

    python docs/site/pictures.py build/pictures [--data build/pictures-data] [--documents]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Browser, Page, expect, sync_playwright

from trivet import Client

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests")]

from ensure_chromium import find_chromium  # noqa: E402 - which the line before makes importable
from local_service import address, up  # noqa: E402

LIMIT_S = 1800.0
CROWD = 1000
WIDTHS = {"": 1280, "-phone": 390}
LAYOUTS = ({}, {"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2})
RATES, WIDE = [0.001, 0.002, 0.005, 0.01, 0.05], [16, 32, 64, 128]


def example(name: str, /, **changes: Any) -> dict[str, Any]:
    """Return the spec of an example with other values."""
    return {**yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text()), **changes}


def ended(client: Client, specs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Run jobs; return their ids by name."""
    ids = {name: client.submit(spec).id for name, spec in specs.items()}
    client.wait_many(list(ids.values()), timeout_s=LIMIT_S)
    return ids


def trainings() -> dict[str, dict[str, Any]]:
    """Return the specs of trainings: an example, a pipeline, a sweep, one that fails, one model in several layouts."""
    grid = {"grid": {"optimizer.lr": RATES, "model.hidden.0": WIDE}, "best": {"metric": "eval_accuracy", "mode": "max"}}
    model = {"family": "transformer", "vocab_size": 256, "dim": 128, "layers": 4, "heads": 4, "max_sequence": 64}
    common = {"model": model, "steps": 10, "evaluate": {}, "checkpoint": {}, "pipeline": {"micro_batches": 4}}
    layouts = {
        f"layout {index}": example(
            "pipeline",
            **common,
            name=" × ".join(f"{key} {n}" for key, n in layout.items()) or "one rank",
            parallel=layout,
        )
        for index, layout in enumerate(LAYOUTS)
    }
    return {
        "train": example("train", labels={"team": "vision"}),
        "pipeline": example("pipeline"),
        "sweep": example("sweep", steps=40, sweep=grid),
        "failed": example("train", name="too little time", timeout_s=3.0, steps=100_000),
        **layouts,
    }


def checks(trained: str, files: list[str]) -> dict[str, dict[str, Any]]:
    """Return the specs of what is asked about a trained model, and about a network and its queries."""
    image = {"robustness": {"data": {"source": "digits"}, "count": 32, "eps": 0.03}}
    of = {"model": {"job": trained}, "property": image, "parallel": {}, "budget": {"seconds": 10}}
    methods = {f"verify {method}": method for method in ("ibp", "crown", "alpha-crown", "beta-crown")}
    network, *queries = files
    # What no attack finds before the search is found by it, and what is nearly falsified takes many splits to prove.
    wider = {"robustness": image["robustness"] | {"count": 12, "eps": 0.06}}
    searched = example(
        "verify",
        **of | {"budget": {"seconds": 6, "restarts": 0}, "property": wider},
        name="digits by search alone",
        method="beta-crown",
    )
    return {
        **{
            name: example("verify", **of, name=f"digits by {method}", method=method) for name, method in methods.items()
        },
        "verify searched": searched,
        "queries": example("queries", model={"onnx": network}, property={"vnnlib": queries}),
        "compile": example("compile", model=of["model"], modes=["eager", "aot_eager"]),
    }


def run_jobs(client: Client, known: Path) -> dict[str, str]:
    """Run what the pages are to show; return the ids of jobs by what they are. Those of an earlier call are kept."""
    found: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}

    def run(specs: dict[str, dict[str, Any]]) -> None:
        found.update(ended(client, {name: spec for name, spec in specs.items() if name not in found}))
        known.write_text(json.dumps(found))

    if "train" not in found:
        client.keys.create("ada", ["submit"])
        client.projects.create("vision", "what cars see")
        client.projects.change("vision", quotas={"devices": 2, "device_hours": 24, "queued_jobs": 100})
        client.projects.set_member("vision", "ada", "submitter")
    run(trainings())
    own = known.parent / "own"
    subprocess.run([sys.executable, ROOT / "examples" / "own_network.py", own], check=True)
    run(checks(found["train"], [client.upload(path).id for path in sorted(own.iterdir())]))
    return found


def pages(ids: dict[str, str]) -> dict[str, str]:
    """Return the addresses of all pages, by what their pictures are called."""
    layouts = ",".join(ids[name] for name in ids if name.startswith("layout"))
    methods = ",".join(ids[name] for name in ids if name.startswith("verify") and name != "verify searched")
    shown = {"jobs": "/", "jobs-of-sweep": f"/?sweep={ids['sweep']}&sort=-result.eval_accuracy"}
    shown |= {
        name: f"/{name}"
        for name in ("queue", "hosts", "projects", "keys", "alerts", "audit", "files", "specs", "docs", "nope")
    }
    shown |= {f"submit-{kind}": f"/submit?kind={kind}" for kind in ("train", "verify", "compile")}
    shown["submit-again"] = f"/submit?from={ids['pipeline']}"
    one_by_one = (
        "train",
        "pipeline",
        "sweep",
        "failed",
        "verify alpha-crown",
        "verify searched",
        "compile",
        "queries",
    )
    shown |= {f"job-{name.replace(' ', '-')}": f"/jobs/{ids[name]}" for name in one_by_one}
    shown |= {f"compare-{view}": f"/compare?sweep={ids['sweep']}&view={view}" for view in ("points", "lines")}
    return shown | {"compare-layouts": f"/compare?ids={layouts}", "compare-methods": f"/compare?ids={methods}"}


@contextmanager
def signed_in(browser: Browser, url: str, key: str) -> Iterator[Page]:
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto("/login")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    yield page
    context.close()


@contextmanager
def crowd(client: Client) -> Iterator[str]:
    """Yield the id of a sweep of a thousand jobs that wait, since no host takes work meanwhile."""
    hosts = [host.name for host in client.hosts()]
    for host in hosts:
        client.drain(host)
    spec = example("train", name="a thousand seeds", sweep={"grid": {"seed": list(range(CROWD))}}, parallel={})
    sweep = client.submit(spec).id
    try:
        yield sweep
    finally:
        client.cancel(sweep)
        client.wait(sweep, timeout_s=LIMIT_S)
        client.delete(sweep)
        for host in hosts:
            client.resume(host)


def take_all(browser: Browser, client: Client, key: str, ids: dict[str, str], asked: argparse.Namespace) -> None:
    """Take the pictures that were asked for: before a sign-in, with what ended, and while a thousand jobs wait."""

    def each(page: Page, shown: dict[str, str]) -> None:
        for name, path in shown.items():
            if name.startswith(asked.only):
                take(page, path, asked.folder / name)

    with browser.new_context(base_url=client.url) as context:
        each(context.new_page(), {"sign-in": "/login"})
    with signed_in(browser, client.url, key) as page:
        each(page, pages(ids))
        if asked.documents:
            take_for_documents(page, ids)
        with crowd(client) as sweep:
            each(page, {"jobs-many": f"/?sweep={sweep}", "jobs-waiting": "/", "queue-waiting": "/queue"})


def take(page: Page, path: str, target: Path) -> None:
    """Open a page and take its pictures: as a whole, light and dark, and on a phone."""
    for suffix, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="light")
        page.goto(path)
        page.wait_for_load_state("networkidle")
        expect(page.locator(".loading, .awaited")).to_have_count(0)
        page.locator(".hosts details").evaluate_all("all => all.forEach((each) => (each.open = true))")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            settled(page)
            page.screenshot(path=f"{target}{suffix}-{scheme}.png", full_page=True)


def settled(page: Page) -> None:
    """Scroll through a page, since charts are drawn when they are seen; wait for two frames."""
    page.evaluate(
        """async () => {
          for (let at = 0; at < document.body.scrollHeight; at += 600) {
            scrollTo(0, at);
            await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
          }
          scrollTo(0, 0);
          await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
        }"""
    )


def take_for_documents(page: Page, ids: dict[str, str]) -> None:
    """Make the pictures that the README and the guides show."""
    page.emulate_media(color_scheme="light")
    for name, job, parts in (
        ("dashboard", "train", None),
        ("timeline", "pipeline", "#plan, #execution"),
        ("verification", "verify searched", None),
    ):
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.goto(f"/jobs/{ids[job]}")
        page.wait_for_load_state("networkidle")
        settled(page)
        clip: Any = None if parts is None else page.evaluate(AROUND, parts)
        page.screenshot(path=ROOT / "docs" / f"{name}.png", clip=clip, full_page=clip is not None)


AROUND = """(parts) => {
  const boxes = [...document.querySelectorAll(parts)].map((part) => part.getBoundingClientRect());
  const [x, y] = [Math.min(...boxes.map((box) => box.x)), Math.min(...boxes.map((box) => box.y))];
  const [right, foot] = [Math.max(...boxes.map((box) => box.right)), Math.max(...boxes.map((box) => box.bottom))];
  return { x: x + scrollX, y: y + scrollY, width: right - x, height: foot - y };
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default="", help="pages whose name begins so")
    parser.add_argument("--documents", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as spare:
        data = (asked.data or Path(spare, "data")).resolve()
        data.parent.mkdir(parents=True, exist_ok=True)
        known = data.with_suffix(".json")
        with up(data, TRIVET_CPU_SLOTS="4", TRIVET_WARM_SUPERVISORS="1") as process:
            url = address(process, data)
            with Client(url, key := (data / "admin.key").read_text().strip()) as client:
                ids = run_jobs(client, known)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
                )
                with Client(url, key) as client:
                    take_all(browser, client, key, ids, asked)
                browser.close()
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)


if __name__ == "__main__":
    main()
