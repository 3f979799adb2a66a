"""A headless Chromium for tests, or the reason why there is none."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SIZE = (1366, 768)
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A driver with a fresh profile that logs the console and every request."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed: see 'make browser'")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in (*_SWITCHES, f"--user-data-dir={profile}", "--window-size={},{}".format(*SIZE)):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        found.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False},
        )
        yield found
    finally:
        found.quit()


def requests(driver: Any) -> list[str]:
    """Addresses that pages have asked for since the last call."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


def complaints(driver: Any) -> list[str]:
    """What pages have logged since the last call, but for advice about how tests read pixels."""
    return [
        entry["message"] for entry in driver.get_log("browser") if entry["source"] != "rendering"
    ]
