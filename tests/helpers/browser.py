"""Debian's Chromium over its own debugging pipe: no driver and no package between the test and the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

DECODE = """async (image) => {
  image.loading = 'eager';
  for (let tries = 0; ; tries++) {  // a video that starts or stops meanwhile has another source: decode that one
    try { return await image.decode(); } catch (error) { if (tries === 40) throw error; }
    await new Promise((later) => setTimeout(later, 50));
  }
}"""
"""JavaScript: load and decode an image."""


class Browser:
    """One page. What it writes to its console, and every exception in it, is kept in ``complaints``."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, "no chromium: `make test-full` installs it"
        their_input, self._output = os.pipe()
        self._input, their_output = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        flags += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # The pipe's ends must be the file descriptors 3 and 4.
        shell = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *flags, "about:blank"],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        """Kinds of the dialogs that the page opened; each was confirmed at once."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        os.close(self._input)
        os.close(self._output)

    def call(self, method: str, **parameters: Any) -> Any:
        number = self._send(method, **parameters)
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _send(self, method: str, **parameters: Any) -> int:
        """The number that the answer will have."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._output, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._input, 1 << 20)
            assert data, "the browser has gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        method, parameters = event.get("method"), event.get("params", {})
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(parameters)[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:100])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(parameters["type"])
            self._send("Page.handleJavaScriptDialog", accept=True)
        elif method == "Page.loadEventFired":
            self._loaded = True
        return event

    def show(self, page: Path | str, *, width: int, dark: bool = False) -> None:
        """Open a file or an address in a window of that width, in the light or dark theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def centre(self, selector: str, index: int = 0) -> tuple[float, float]:
        """Of an element, scrolled into view."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())")
        return box[0], box[1]

    def mouse(self, kind: str, place: tuple[float, float], **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **more)

    def click(self, selector: str, index: int = 0) -> None:
        """As a reader does: with the mouse, where the element is."""
        place = self.centre(selector, index)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, place, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """As on a keyboard: `Enter`, `Escape`, `ArrowRight`, or a character, into whatever has the focus."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        number = {"Enter": 13, "Escape": 27}.get(key, 0)  # without it the browser does not close a dialog
        for kind in ("keyDown", "keyUp"):
            typed = text if kind == "keyDown" else ""
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=typed, windowsVirtualKeyCode=number)

    def choose(self, selector: str, value: str) -> None:
        """An option of a menu, or the text of a field."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(
            f"{element}.value = {json.dumps(value)}; {element}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        self.run("scrollTo({top: 0, behavior: 'instant'})")
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        self.run(f"Promise.all([...document.images].map({DECODE}))")
        time.sleep(0.1)
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(data))
