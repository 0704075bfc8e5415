"""Headless Chromium that tells what went wrong in it and what it asked for."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

AXE = (Path(__file__).parent / "axe.min.js").read_text(encoding="utf-8")
READY = """document.readyState === "complete" &&
(!document.getElementById("data") || "drawn" in document.documentElement.dataset)"""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One window."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
        driver = shutil.which("chromedriver")
        assert program, "Chromium is missing: make test installs it."
        assert driver, "Chromium's driver is missing: make test installs it."
        options = Options()
        options.binary_location = program
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver: Any = webdriver.Chrome(options=options, service=Service(driver))

    def open(self, address: str, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Go to an address, with a screen of this size."""
        self.log()
        self.screen(width, height, dark)
        self.driver.get("about:blank")
        self.driver.get(address)
        self.until(lambda: self.run(READY))

    def screen(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Another screen; a narrow one is a phone's."""
        self.width = width
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script: str, *values: Any) -> Any:
        """What an expression of JavaScript gives."""
        return self.driver.execute_script(f"return {script}", *values)

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.run("document.querySelectorAll(arguments[0]).length", selector))

    def text(self, selector: str) -> str:
        """The text of the first such element."""
        return str(self.run("document.querySelector(arguments[0]).textContent", selector))

    def find(self, selector: str) -> Any:
        """The first such element."""
        return self.driver.find_element("css selector", selector)

    def until(self, what: Callable[[], Any], seconds: float = 150) -> Any:
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not (found := what()):
            if time.monotonic() > end:
                raise AssertionError(f"waited {seconds} s in vain: {self.run('document.body.innerText')[:1000]}")
            time.sleep(0.1)
        return found

    def log(self) -> list[str]:
        """What the console was told since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last time."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def sideways(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return int(self.run("document.documentElement.scrollWidth")) - self.width

    def findings(self) -> list[str]:
        """What axe-core finds moderate or worse."""
        self.driver.execute_script(AXE)
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then((r) => done(r.violations), (e) => done(String(e)))"
        )
        assert isinstance(found, list), found
        return [
            f"{v['id']}: {v['help']}: {[n['html'][:160] for n in v['nodes'][:3]]}"
            for v in found
            if v["impact"] in ("moderate", "serious", "critical")
        ]
