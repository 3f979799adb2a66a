"""The report in a real browser: it draws, asks for nothing, and obeys mouse and keyboard."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import heterog
from heterog.cluster import Cluster
from heterog.report.lanes import view_lanes
from heterog.report.side_by_side import NamedPlan, write_comparison_page
from heterog.search.plan import Plan
from heterog.simulator.timeline import Timeline
from heterog.strategy.strategy import Decision, Sync
from tests.report.browser import SIZE, chromium, complaints, requests
from tests.report.hostile import forced
from tests.search.asking import make_plan
from tests.simulator import builders
from tests.thorough import THOROUGH, few_of

Open = Callable[[Plan], "Page"]
EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


class Page:
    """A report in the browser, with the few things that a person does."""

    def __init__(self, driver: Any, plan: Plan) -> None:
        from selenium.webdriver import ActionChains

        self.driver = driver
        self.timeline: Timeline = plan.timeline()
        self.canvas = self.find("timeline")
        self._chain: Any = ActionChains
        driver.execute_script("arguments[0].scrollIntoView()", self.canvas)

    def find(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    @property
    def view(self) -> tuple[float, float]:
        """The seconds that the timeline shows."""
        self.settle()
        begin, end = (float(self.canvas.get_attribute(f"data-{key}")) for key in ("from", "to"))
        return begin, end

    def x_of(self, time_s: float) -> float:
        gutter, edge = (float(self.canvas.get_attribute(f"data-{k}")) for k in ("gutter", "edge"))
        begin, end = self.view
        return gutter + (time_s - begin) / (end - begin) * (edge - gutter)

    def _actions(self) -> Any:
        return self._chain(self.driver, duration=20)

    def _to(self, time_s: float, y: float) -> Any:
        size = self.canvas.size
        x = self.x_of(time_s) - size["width"] / 2
        return self._actions().move_to_element_with_offset(
            self.canvas, round(x), round(y - size["height"] / 2)
        )

    @property
    def first_lane(self) -> float:
        return float(self.canvas.get_attribute("data-axis")) + 10

    def point(self, time_s: float) -> None:
        """Put the mouse on the first lane."""
        self._to(time_s, self.first_lane).perform()
        self.settle()

    def click(self, time_s: float) -> None:
        self._to(time_s, self.first_lane).click().perform()
        self.settle()

    def drag(self, time_s: float, pixels: int) -> None:
        self._to(time_s, self.first_lane).click_and_hold().move_by_offset(
            pixels, 0
        ).release().perform()
        self.settle()

    def wheel(self, time_s: float, notches: int) -> None:
        from selenium.webdriver.common.actions import wheel_input

        origins: Any = wheel_input.ScrollOrigin
        size = self.canvas.size
        origin = origins.from_element(
            self.canvas,
            round(self.x_of(time_s) - size["width"] / 2),
            round(self.first_lane - size["height"] / 2),
        )
        for _ in range(abs(notches)):
            self._actions().scroll_from_origin(origin, 0, 120 if notches > 0 else -120).perform()
        self.settle()

    def press(self, *keys: str) -> None:
        self.driver.execute_script("arguments[0].focus()", self.canvas)
        for key in keys:
            self._actions().send_keys(key).perform()
        self.settle()

    def text(self, name: str) -> str:
        return str(self.find(name).get_attribute("textContent"))

    def colours(self, name: str) -> int:
        """How many colours a canvas shows."""
        return int(
            self.driver.execute_script(
                "const c = document.getElementById(arguments[0]);"
                "const bytes = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                "return new Set(new Uint32Array(bytes.buffer)).size",
                name,
            )
        )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(driver: Any, tmp_path: Path) -> Open:
    def call(plan: Plan) -> Page:
        path = tmp_path / "plan.html"
        plan.report(path)
        requests(driver)  # those of the test before
        complaints(driver)
        driver.get(path.as_uri())
        page = Page(driver, plan)
        page.settle()
        assert complaints(driver) == []
        assert set(requests(driver)) <= {path.as_uri(), "data:,"}
        return page

    return call


@pytest.fixture(scope="module")
def plan() -> Plan:
    workload = heterog.Workload(
        lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)),
        (torch.zeros(64, 1024), torch.zeros(64, 8)),
        functional.mse_loss,
        torch.optim.Adam,
    )
    cluster = Cluster.load("paper_8gpu")
    graph = heterog.capture(workload)
    return make_plan(graph, cluster, methods=("ddp", "ev_ps", "tuned_uniform"), budget="50e")


def first_device_task(timeline: Timeline, number: int = 0) -> int:
    """The longest (or second longest, ...) forward op of the first lane."""
    tasks = [t for t in view_lanes(timeline)[0].tasks.tolist() if timeline.kind(t) == "forward"]
    return int(sorted(tasks, key=lambda t: timeline.start[t] - timeline.finish[t])[number])


def middle(timeline: Timeline, task: int) -> float:
    return float(timeline.start[task] + timeline.finish[task]) / 2


@pytest.mark.parametrize("scheme", few_of(["dark", "light"], 1))
def test_a_real_plan_is_drawn_in_both_schemes(
    driver: Any, opened: Open, plan: Plan, scheme: str
) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page = opened(plan)
    assert page.view == pytest.approx((0.0, page.timeline.seconds))
    assert page.colours("timeline") > 20
    assert page.colours("memory") > 5
    width = driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= SIZE[0], "the page scrolls sideways"
    body = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    red = int(body.removeprefix("rgb(").partition(",")[0])
    assert (red > 128) == (scheme == "light")
    assert f"{plan.graph.name} on paper_8gpu" in driver.find_element("tag name", "h1").text


def test_what_can_be_pressed_has_a_name(driver: Any, opened: Open, plan: Plan) -> None:
    opened(plan)
    for each in driver.find_elements("css selector", "button, input, canvas, summary, svg"):
        assert each.accessible_name.strip(), each.get_attribute("outerHTML")


def test_the_mouse_zooms_pans_and_resets(opened: Open, plan: Plan) -> None:
    page = opened(plan)
    whole = page.view
    time_s = 0.3 * whole[1]
    before = page.x_of(time_s)
    page.wheel(time_s, -4)
    begin, end = page.view
    assert end - begin < 0.5 * whole[1]
    assert page.x_of(time_s) == pytest.approx(before, abs=1.5), "what is under the mouse stays"
    page.drag(time_s, 100)
    moved = page.view
    assert moved[0] < begin
    assert moved[1] - moved[0] == pytest.approx(end - begin)
    page.wheel(time_s, 4)
    assert page.view == pytest.approx(whole, rel=1e-3)
    page.find("in").click()
    assert page.view[1] - page.view[0] == pytest.approx(0.5 * whole[1])
    page.find("reset").click()
    assert page.view == whole
    scrolled = page.driver.execute_script("return window.scrollY")
    page.wheel(time_s, 1)
    assert page.view == whole
    assert page.driver.execute_script("return window.scrollY") > scrolled, "the page goes on"


def test_the_mouse_reads_tasks(opened: Open, plan: Plan) -> None:
    page = opened(plan)
    timeline = page.timeline
    task = first_device_task(timeline)
    page.point(middle(timeline, task))
    assert page.find("tip").is_displayed()
    told = page.text("tip")
    assert told.startswith(timeline.name(task))
    assert f"module {timeline.module(task) or '(root)'}" in told
    assert "on A:0 (V100-16GB)" in told
    assert f"{timeline.program.samples[task]} samples" in told
    page.click(middle(timeline, task))
    assert page.text("details").startswith(timeline.name(task))
    page.point(0.9999 * page.view[1])
    page.press("\ue00c")  # escape
    assert page.text("details") == ""
    assert not page.find("tip").is_displayed()


def test_the_keyboard_is_enough(opened: Open, plan: Plan) -> None:
    page = opened(plan)
    whole = page.view
    page.press("+", "+")
    begin, end = page.view
    assert end - begin == pytest.approx(0.25 * whole[1])
    page.press("\ue014")  # arrow right
    assert page.view[0] > begin
    page.press("0")
    assert page.view == pytest.approx(whole)
    page.press("\ue015")  # arrow down: the first lane
    assert page.text("details").startswith("A:0 (V100-16GB): ")
    tasks = view_lanes(page.timeline)[0].tasks.tolist()
    page.press(".", ".")
    assert page.text("details").startswith(page.timeline.name(tasks[1]))
    page.press(",", "\ue007")  # enter
    begin, end = page.view
    assert begin <= page.timeline.start[tasks[0]] <= page.timeline.finish[tasks[0]] <= end
    assert end - begin < whole[1]
    page.press("c")
    assert page.find("critical").get_attribute("aria-pressed") == "true"


def test_links_hide_and_words_are_found(opened: Open, plan: Plan) -> None:
    page = opened(plan)
    tall, all_colours = page.canvas.size["height"], page.colours("timeline")
    page.find("find").send_keys("no such op")
    page.settle()
    assert page.colours("timeline") != all_colours
    page.find("find").clear()
    page.find("links").click()
    page.settle()
    assert page.canvas.size["height"] <= tall
    page.driver.find_element("css selector", "#legend button").click()
    assert page.driver.find_element("css selector", "#legend button[aria-pressed=true]").text


def test_modules_open_and_close(driver: Any, opened: Open, plan: Plan) -> None:
    page = opened(plan)
    closed = "return document.querySelectorAll('.tree details:not([open])').length"
    page.find("close").click()
    assert driver.execute_script(closed) > 0
    driver.find_element("css selector", ".tree summary").send_keys("\ue007")
    page.find("open").click()
    assert driver.execute_script(closed) == 0


@THOROUGH
def test_twenty_thousand_tasks(opened: Open) -> None:
    graph = builders.linear_chain([f"block.{i // 20}.{i % 20}" for i in range(520)], width=256)
    cluster = Cluster.load("paper_8gpu")
    served = Decision(devices=tuple(range(8)), shares=(1,) * 8, sync=Sync.PARAMETER_SERVER)
    homes = [index % 8 for index in range(520)]
    strategy = builders.strategy_of(graph, cluster, served, homes=homes)
    plan = builders.plan_by_hand(graph, cluster, strategy)
    page = opened(plan)
    assert page.timeline.program.num_tasks > 20_000
    assert page.colours("timeline") > 20
    task = first_device_task(page.timeline, 5)
    time_s = middle(page.timeline, task)
    page.wheel(time_s, -20)
    page.point(time_s)
    assert page.text("tip").startswith(page.timeline.name(task))
    page.press("c", "0")
    assert page.view == pytest.approx((0.0, page.timeline.seconds))


def test_text_of_a_model_is_inert(driver: Any, opened: Open) -> None:
    graph = builders.linear_chain((f"a{EVIL}", f"b{EVIL}"))
    graph = forced(graph, name=EVIL, source=EVIL)
    cluster = builders.cluster_of((10.0, ["V100-16GB"]), (10.0, ["P100-12GB"]))
    decision = Decision(devices=(0, 1), shares=(6, 2))
    plan = builders.plan_by_hand(graph, cluster, builders.strategy_of(graph, cluster, decision))
    page = opened(plan)
    task = first_device_task(page.timeline)
    page.click(middle(page.timeline, task))
    assert EVIL in page.text("tip")
    assert EVIL in page.text("details")
    assert driver.find_elements("css selector", "img") == []
    assert driver.title == f"heterog: {EVIL} on tiny"
    assert complaints(driver) == []


@pytest.mark.parametrize("width", [390, 900, 1400])
def test_nothing_sticks_out_at_any_width(
    driver: Any, opened: Open, plan: Plan, tmp_path: Path, width: int
) -> None:
    """Pages do not scroll sideways, and no text is cut off by the box it is in."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    path = tmp_path / "plans.html"
    named = [NamedPlan(name="one", plan=plan), NamedPlan(name="two", plan=plan)]
    write_comparison_page(path, named)
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        opened(plan)
        check_layout(driver, width)
        driver.get(path.as_uri())
        check_layout(driver, width)
        assert complaints(driver) == []
    finally:
        size |= {"width": SIZE[0], "height": SIZE[1]}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def check_layout(driver: Any, width: int) -> None:
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    # What stands in a box that may scroll (tables, the tree, plans beside each other) is exempt.
    outside = driver.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3, p, li, dt, dd, figure, summary')]"
        ".filter((e) => !e.closest('.wide, .tree, .plans') && e.offsetParent !== null)"
        ".filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1"
        " || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline')"
        ".map((e) => e.outerHTML.slice(0, 200))"
    )
    assert outside == []


def test_pictures_are_there_and_prose_unfolds(driver: Any, opened: Open, plan: Plan) -> None:
    opened(plan)
    hosts = driver.find_elements("css selector", ".host svg")
    assert len(hosts) == len(set(plan.cluster.host_kind)), "alike hosts are one card"
    assert all(each.size["width"] > 0 and each.size["height"] > 0 for each in hosts)
    lines = driver.find_elements("css selector", ".lines path")
    assert len(lines) == 1 + len(plan.history)
    prose = driver.find_element("css selector", ".prose")
    assert not prose.find_element("css selector", "p").is_displayed()
    prose.find_element("css selector", "summary").click()
    assert prose.find_element("css selector", "p").is_displayed()
