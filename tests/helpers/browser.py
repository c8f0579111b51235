"""A headless Chromium that scripts and tests drive through its own protocol (CDP), over a pair of pipes."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]  # fmt: skip
MISSING = "no Chromium on this machine (Debian: apt-get install chromium)"
# Chromium reads commands from its file 3 and writes answers to its file 4.
_BEGIN = (
    "import os, sys; to, back, *words = sys.argv[1:]; "
    "os.dup2(int(to), 3); os.dup2(int(back), 4); os.execv(words[0], words)"
)
_PATIENCE = 120  # seconds that a command may take


class Browser:
    """One page; `open_browser` makes it.

    Attributes:
        said: what pages wrote to the console and what the browser complained about there, such as a blocked file.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._held, self._number = to, back, b"", 0
        self._session: str | None = None
        self.said: list[str] = []
        page = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def go(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        self.command("Page.navigate", url=address)
        self.wait("return document.readyState == 'complete' && location.href != 'about:blank'")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns, `return document.title` say; RuntimeError where it throws."""
        words = f"(function() {{ {script} }})(...{json.dumps(arguments)})"
        found = self.command("Runtime.evaluate", expression=words, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", "the script threw"))
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Runs a piece of JavaScript until it returns something true; TimeoutError where it never does."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: still {found!r} after {seconds} s")
            time.sleep(0.1)
        return found

    def command(self, name: str, **parameters: Any) -> Any:
        """Sends a command of the protocol and returns its result; RuntimeError where the browser refuses it."""
        self._number += 1
        asked = {"id": self._number, "method": name, "params": parameters}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while (told := self._next()).get("id") != self._number:
            self._note(told)
        if "error" in told:
            raise RuntimeError(f"{name}: {told['error']['message']}")
        return told["result"]

    def resize(self, width: int, height: int) -> None:
        """The page's size in pixels; narrower than a window can be, as on a telephone."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Lets pages see a reader who prefers `light` or `dark` colours."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

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

    def _next(self) -> dict[str, Any]:
        """Returns the browser's next message."""
        while b"\0" not in self._held:
            if not select.select([self._back], [], [], _PATIENCE)[0]:
                raise TimeoutError(f"the browser said nothing for {_PATIENCE} s")
            part = os.read(self._back, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(part.get("value")) for part in told["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.said.append(told["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(told["exceptionDetails"].get("exception", {}).get("description")))


@contextlib.contextmanager
def open_browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a profile of its own, closed at the end. FileNotFoundError where there is none."""
    if CHROMIUM is None:
        raise FileNotFoundError(MISSING)
    (to_read, to_write), (back_read, back_write) = _high_pipe(), _high_pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(to_read), str(back_write), *words],
            pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(back_write)
        try:
            browser = Browser(to_write, back_read)
            browser.resize(width, height)
            yield browser
        finally:
            os.close(to_write)  # which ends it
            os.close(back_read)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _high_pipe() -> tuple[int, int]:
    """Returns the two ends of a pipe, whose numbers are none that Chromium takes for its own."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
