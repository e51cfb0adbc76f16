"""A real browser for tests, over Chromium's debugging pipe: no driver, no port, no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds for one answer; far more than it takes on a busy machine


def executable() -> str | None:
    """The first browser of the Chromium family on the PATH."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab; `events` keeps everything that the page said since it was opened."""

    def __init__(self, process: subprocess.Popen[bytes], send: int, receive: int) -> None:
        self.process, self.sender, self.receiver = process, send, receive
        self.number, self.buffer, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; what arrives in between is an event."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sender, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.receiver], [], [], deadline - time.monotonic())
            data = os.read(self.receiver, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path) -> None:
        """Load a file and wait until it is complete."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Another window; narrow ones count as phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """'light' or 'dark'."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG, however long it is."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        found = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [str(e["params"]["request"]["url"]) for e in found]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that nothing caught."""
        found = []
        for event in self.events:
            method, what = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"]))
            elif method == "Log.entryAdded":
                found.append(str(what["entry"]["text"]))
            elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
                found.append(str(what["args"]))
        return found


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A headless browser with a profile of its own, ended and removed afterwards."""
    name = executable()
    assert name is not None
    to_child, send = os.pipe()
    receive, from_child = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--no-first-run", "--disable-extensions", "--disable-background-networking"]
    flags += ["--remote-debugging-pipe", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def pipes() -> None:  # the browser reads commands from descriptor 3, answers on 4
            first, second = os.dup(to_child), os.dup(from_child)
            os.dup2(first, 3)
            os.dup2(second, 4)

        process = subprocess.Popen(
            [name, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=pipes,
        )
        os.close(to_child)
        os.close(from_child)
        try:
            yield Browser(process, send, receive)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(send)
            os.close(receive)
