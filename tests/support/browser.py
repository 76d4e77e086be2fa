"""Drives a real browser without a screen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1280,1000"),
)


class Browser:
    """A browser with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        for option in (*_OPTIONS, f"--user-data-dir={folder}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))

    def close(self) -> None:
        self._driver.quit()

    def open(self, url: str) -> None:
        self._driver.get(url)

    def resize(self, width: int, height: int) -> None:
        """As on a screen of that size; below 500 pixels, as on a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Dark or light."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str) -> Any:
        return self._driver.execute_script(script)

    @property
    def text(self) -> str:
        """What the page shows."""
        return self._driver.find_element(By.TAG_NAME, "body").text

    def wait_for(self, selector: str, text: str = "", seconds: float = 90) -> None:
        """Until an element that `selector` names contains `text`. AssertionError with the page without it."""

        def is_there(driver: Any) -> bool:
            script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
            return any(text in each for each in driver.execute_script(script, selector))

        try:
            WebDriverWait(self._driver, seconds).until(is_there)
        except Exception as error:
            raise AssertionError(f"no '{text}' in {selector} within {seconds} s:\n{self.text}") from error

    def complaints(self) -> list[str]:
        """Warnings and errors of the browser about the pages since the last call; hints are left out."""
        said = self._driver.get_log("browser")
        return [f"{each['level']}: {each['message']}" for each in said if each["level"] != "DEBUG"]

    @property
    def is_too_wide(self) -> bool:
        """Whether the page scrolls sideways."""
        return bool(self.run("return document.documentElement.scrollWidth > window.innerWidth"))
