"""Every page: who may see it, what it shows without data, how it looks to eyes, keyboards and small screens."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dashboard_service import Complaints, Service, shown
from fleet import Fleet, compile_spec, event, train_spec, verify_spec
from playwright.sync_api import Page, expect
from redis import Redis

from api.dashboard.assets import Assets
from api.front.middleware import SECURITY_HEADERS
from service.jobs.records import AllocatedDevices, JobError
from service.jobs.store import HostReport
from service.jobs.store.keyspace import LEASES

pytestmark = pytest.mark.browser

CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour.startsWith("rgb") && (parse(colour)[3] ?? 1) === 1) return parse(colour);
    }
    throw new Error("nothing behind");
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.matches("option, .unseen, .skip")) continue;
    const front = luminance(parse(getComputedStyle(element).color));
    const back = luminance(behind(element));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    found.push([ratio, `${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 40)}`]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


@pytest.fixture
def addresses(fleet: Fleet) -> dict[str, str]:
    """A page of every kind, with something on it."""
    train = fleet.run(train_spec(labels={"team": "vision"}))
    for step in range(1, 6):
        train.metric(step, of=10, loss=1 / step, lr=0.001)
    train.log("step 5", 0)
    train.log("a warning", 1, "stderr")
    train.artifact("model.safetensors", b"x" * 2000)
    train.artifact("a/very/long/name/" + "of_a_file_that_goes_on" * 4, b"x")
    verify = fleet.run(verify_spec())
    verify.bound(0, 0.5)
    verify.bound(1, -0.2, "falsified", counterexample=[0.1] * 64)
    compiled = fleet.run(compile_spec())
    failed = fleet.run(train_spec("broken"))
    failed.fail(JobError(type="ValueError", message="no", rank=1))
    return {
        "jobs": "/",
        "hosts": "/hosts",
        "keys": "/keys",
        "specs": "/specs",
        "files": "/files",
        "submit": f"/submit?from={train.job_id}",
        "compare": f"/compare?ids={train.job_id},{failed.job_id},{verify.job_id}",
        **{
            name: f"/jobs/{attempt.job_id}"
            for name, attempt in {"train": train, "verify": verify, "compile": compiled, "failed": failed}.items()
        },
    }


@pytest.mark.slow
def test_pages_say_when_there_is_nothing(page: Page, complaints: Complaints) -> None:
    complaints.expected = ("404",)
    shown(page, "/")
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    shown(page, "/hosts")
    expect(page.get_by_text("No hosts")).to_be_visible()
    page.goto("/jobs/job_00000000000000000000")
    expect(page.get_by_text("No such job")).to_be_visible()


@pytest.mark.parametrize(
    "path",
    [
        "/files",
        *(pytest.param(f"/{name}", marks=pytest.mark.slow) for name in ("keys", "specs", "compare?q=x", "submit")),
    ],
)
def test_a_page_that_nobody_answered_asks_again(page: Page, complaints: Complaints, path: str) -> None:
    complaints.expected = ("ERR_FAILED",)
    page.route("**/v1/**", lambda route: route.abort())
    page.goto(path)
    expect(page.get_by_text("The service cannot be reached.").first).to_be_visible()
    page.unroute("**/v1/**")
    expect(page.get_by_text("The service cannot be reached.")).to_have_count(0)


@pytest.mark.slow
def test_headers_and_unknown_paths(page: Page, service: Service) -> None:
    for path in ("/login", "/", "/hosts", "/jobs/x"):
        response = page.request.get(path)
        assert response.status == 200
        assert response.headers["content-security-policy"] == SECURITY_HEADERS["Content-Security-Policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        body = response.text()
        assert "style=" not in body
        assert "<script>" not in body
    assert page.request.get("/static/../pages.py").status == 404
    assert page.request.get("/static/%2e%2e/pages.py").status == 404
    assert page.request.get("/static/base.css").headers["cache-control"] == "no-cache"
    assert page.request.get(f"/static/v-{'0' * 16}/base.css").headers["cache-control"] == "no-cache"
    assert "immutable" in page.request.get(f"{Assets.found().root}/base.css").headers["cache-control"]


def test_filters_search_and_labels(page: Page, fleet: Fleet) -> None:
    fleet.submit(train_spec("alpha", labels={"team": "vision"}))
    fleet.submit(train_spec("beta"))
    fleet.submit(verify_spec("gamma"))
    shown(page, "/")
    expect(page.locator("#rows tr")).to_have_count(3)
    page.get_by_label("Kind").select_option("train")
    expect(page.locator("#rows .name")).to_have_text(["alpha", "beta"])
    page.get_by_label("Search names and ids").fill("alp")
    expect(page.locator("#rows .name")).to_have_text(["alpha"])
    assert "kind=train" in page.url
    assert "q=alp" in page.url
    page.reload()
    expect(page.locator("#rows .name")).to_have_text(["alpha"])
    page.locator(".chip", has_text="vision").click()
    expect(page.locator("#rows .name")).to_have_text(["alpha"])
    page.get_by_role("group", name="States").get_by_role("button", name="failed").click()
    expect(page.get_by_text("No job matches")).to_be_visible()
    page.get_by_role("link", name="Clear filters").click()
    expect(page.locator("#rows tr")).to_have_count(3)


@pytest.mark.slow
def test_the_list_goes_from_page_to_page(page: Page, fleet: Fleet) -> None:
    for index in range(53):
        fleet.submit(train_spec(f"job {index}"))
    shown(page, "/?order=newest")
    expect(page.locator("#rows tr")).to_have_count(50)
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#rows .name")).to_have_text(["job 2", "job 1", "job 0"])
    expect(page.get_by_role("button", name="Next")).to_be_hidden()
    bookmarked = page.url
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("#rows tr")).to_have_count(50)
    shown(page, "/hosts")
    shown(page, bookmarked)
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("#rows tr")).to_have_count(50)
    assert page.url.endswith("/?order=newest")


def test_hosts_show_who_holds_what_and_can_be_drained(page: Page, fleet: Fleet) -> None:
    fleet.host("gpu-a", cuda=["NVIDIA H100 80GB HBM3"] * 8, cpu=0)
    job = fleet.run(train_spec("big", device="cuda", parallel={"dp_shard": 4}))
    shown(page, "/hosts")
    card = page.locator(".host[data-host='gpu-a']")
    expect(card.locator(".device[data-free='false']")).to_have_count(4)
    expect(card.locator(".device[data-free='true']")).to_have_count(4)
    expect(card.locator("a.device").first).to_have_attribute("href", f"/jobs/{job.job_id}")
    card.get_by_text("What ran here").click()
    drawn = card.locator(".ran canvas")
    expect(drawn).to_have_attribute("aria-label", re.compile("4 rows, 4 cells"))
    drawn.press("ArrowRight")
    expect(card.locator(".ran .reading")).to_contain_text("big · train · running")
    card.get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Drain the host").click()
    expect(card.locator(".state")).to_have_text("draining")
    card.get_by_role("button", name="Resume").click()
    expect(card.locator(".state")).to_have_text("alive")


@pytest.mark.slow
def test_hosts_show_what_launchers_have_and_what_was_given_for_one_job(page: Page, fleet: Fleet) -> None:
    has = AllocatedDevices(launcher="slurm", id="12.0", job=None, pool="cpu", devices=2)
    fleet.store.hosts.beat(HostReport("login", "10.0.0.7", launchers={"slurm": "main: 1 of 2 nodes idle"}))
    fleet.store.hosts.beat(HostReport("slurm-12.0-0", "10.0.0.8", allocation=has))
    shown(page, "/hosts")
    login, node = (page.locator(f".host[data-host='{name}']") for name in ("login", "slurm-12.0-0"))
    expect(login.locator(".launchers")).to_have_text("Launcher slurm: main: 1 of 2 nodes idle")
    expect(login.get_by_role("button", name="Drain")).to_be_visible()
    expect(node.locator(".launchers")).to_have_text("2 cpu devices of slurm 12.0, for one job")
    expect(node.get_by_role("button", name="Drain")).to_be_hidden()
    expect(page.locator(".host[data-host='cpu-a'] .launchers")).to_be_hidden()


@pytest.mark.slow
def test_a_host_that_starts_nothing_is_marked_with_the_reason_until_it_is_resumed(
    page: Page, fleet: Fleet, redis: Redis
) -> None:
    fleet.host("sick", cuda=["NVIDIA H100 80GB HBM3"] * 2, cpu=0)
    jobs = [fleet.submit(train_spec("unlucky", device="cuda")) for _ in range(2)]
    fleet.store.attempts.place()
    assert redis.zadd(LEASES(), {f"{job.id}:1:sick": 1 for job in jobs}, xx=True, ch=True) == 2
    fleet.store.attempts.reap()
    shown(page, "/hosts")
    card = page.locator(".host[data-host='sick']")
    expect(card.locator(".state")).to_have_text("failing")
    expect(card.locator(".failing")).to_contain_text(
        "nobody on host sick claimed the job in time. It is tried again in"
    )
    card.get_by_role("button", name="Resume").click()
    expect(card.locator(".state")).to_have_text("alive")
    expect(card.locator(".failing")).to_be_hidden()


@pytest.mark.slow
def test_devices_of_a_lost_attempt_are_held_until_its_host_confirms(page: Page, fleet: Fleet, redis: Redis) -> None:
    job = fleet.run(train_spec("gone", parallel={"dp_shard": 2}))
    assert redis.zadd(LEASES(), {str(job.refs[0]): 1}, xx=True, ch=True) == 1
    fleet.store.attempts.reap()
    shown(page, "/hosts")
    card = page.locator(".host[data-host='cpu-a']")
    expect(card.locator(".device[data-lost] .holder")).to_have_text(["lost: gone", "lost: gone"])
    fleet.host("cpu-a", cpu=4)
    expect(card.locator(".device[data-free='true']")).to_have_count(4)


@pytest.mark.slow
def test_dependencies_are_links(page: Page, fleet: Fleet) -> None:
    first = fleet.run(train_spec("the model"))
    second = fleet.submit(verify_spec(model={"job": first.job_id}))
    shown(page, f"/jobs/{second.id}")
    link = page.locator(".need a")
    expect(link).to_have_text("the model")
    expect(link).to_have_attribute("href", f"/jobs/{first.job_id}")
    expect(page.locator(".need .state")).to_have_text("running")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(page: Page, addresses: dict[str, str], scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for path in [*addresses.values(), "/login"]:
        shown(page, path)
        worst, text = page.evaluate(CONTRAST)[0]
        assert worst >= 4.5, f"{path} in {scheme}: {worst:.2f} at {text}"


@pytest.mark.slow
def test_the_theme_can_be_switched_and_stays(page: Page) -> None:
    shown(page, "/")
    before = page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    assert dark != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor") == dark


def test_nothing_is_wider_than_a_phone(page: Page, addresses: dict[str, str]) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for path in [*addresses.values(), "/login"]:
        shown(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path


@pytest.mark.slow
def test_a_job_can_be_opened_and_left_by_keyboard(page: Page, addresses: dict[str, str]) -> None:
    shown(page, "/")
    page.locator("#rows .name", has_text="digits-mlp").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".jobhead h1")).to_be_visible()
    canvas = page.locator(".chart canvas").first
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".chart[data-chart='Loss'] .value")).to_have_text("0.2500")
    page.keyboard.press("Escape")
    expect(page.locator(".chart[data-chart='Loss'] .value")).to_have_text("0.2000")
    page.locator("#cancel").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_hostile_words_stay_words(page: Page, fleet: Fleet) -> None:
    attack = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>"\'&lt;'
    job = fleet.run(train_spec(attack, labels={"team": attack[:110]}))
    job.log(attack)
    job.log("\x1b[31m" + attack, 1, "stderr")
    job.emit(event("metric", 0, step=1, values={attack: 1.0, "__proto__": 2.0, "constructor": 3.0}))
    job.artifact("javascript:alert(1)", b"x")
    shown(page, f"/jobs/{job.job_id}")
    expect(page.locator(".line .text").first).to_have_text(attack)
    expect(page.locator(".line .text").nth(1)).to_have_text(attack)
    expect(page.locator(".jobhead h1")).to_have_text(attack)
    expect(page.locator(".chart")).to_have_count(3)
    expect(page.locator(".file a")).to_have_attribute("href", re.compile("^/v1/jobs/"))
    job.fail(JobError(type=attack, message=attack, rank=0, traceback_artifact="//example.org/x"))
    expect(page.locator(".failure strong")).to_contain_text(attack)
    shown(page, "/")
    expect(page.locator("#rows .name")).to_have_text(attack)
    other = fleet.run(train_spec())
    other.succeed({attack: 1.0, "constructor": 2.0, "toString": attack, "nested": {"__proto__": 3.0}})
    shown(page, f"/jobs/{other.job_id}")
    expect(page.locator("#result dd")).to_have_text(["1", "2", "3", attack])
    assert page.evaluate("window.hit") is None
    assert page.locator("main img, main script").count() == 0


@pytest.mark.slow
def test_a_name_neither_acts_on_the_page_nor_rearranges_it(page: Page, fleet: Fleet, redis: Redis) -> None:
    attempt = fleet.run(train_spec())
    name = "<img src=x onerror=alert(1)> \u202egnp.exe \x1b[2J"
    redis.hset(f"trivet:job:{attempt.job_id}", "name", name)
    for path in ("/", f"/jobs/{attempt.job_id}"):
        shown(page, path)
        expect(page.locator("main")).to_contain_text(r"<img src=x onerror=alert(1)> \u202egnp.exe \u001b[2J")
        expect(page.locator("main img")).to_have_count(0)
        assert not {"\u202e", "\x1b"} & set(page.title() + page.locator("body").inner_text())
