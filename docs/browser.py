"""A headless Chromium that scripts and tests drive through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
DRIVER = shutil.which("chromedriver")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]  # fmt: skip
MISSING = "no Chromium with chromedriver on this machine (Debian: apt-get install chromium chromium-driver)"


class Browser:
    """One window; `open` makes it."""

    def __init__(self, session: str) -> None:
        self.session = session

    def go(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        _post(f"{self.session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns, `return document.title` say."""
        return _post(f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Runs a piece of JavaScript until it returns something true; TimeoutError where it never does."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: still {found!r} after {seconds} s")
            time.sleep(0.1)
        return found

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return _post(f"{self.session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """The page's size in pixels; narrower than a window can be, as on a telephone."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def screenshot(self, file: Path, whole: bool = True) -> None:
        """A PNG of the page, or of the part of it that is seen."""
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        file.write_bytes(base64.b64decode(taken["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        page = "document.documentElement"
        width, height = self.wait(f"return {page}.scrollWidth && [{page}.scrollWidth, {page}.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": min(height, 8000), "scale": 1}}


@contextlib.contextmanager
def open_browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a profile of its own, closed at the end. FileNotFoundError where there is none."""
    if CHROMIUM is None or DRIVER is None:
        raise FileNotFoundError(MISSING)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            root = f"http://127.0.0.1:{port}"
            _wait_for(f"{root}/status")
            options = {"binary": CHROMIUM, "args": [*QUIET, f"--user-data-dir={profile}"]}
            made = _post(f"{root}/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
            browser = Browser(f"{root}/session/{made['sessionId']}")
            browser.resize(width, height)
            yield browser
            urllib.request.urlopen(urllib.request.Request(browser.session, method="DELETE"), timeout=30).close()
        finally:
            driver.terminate()
            driver.wait()


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None


def _wait_for(address: str) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address, timeout=10).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"{address} does not answer")
