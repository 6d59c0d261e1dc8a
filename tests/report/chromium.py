"""Debian's Chromium, driven over its own pipe: nothing else is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress

PROGRAM = shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]  # fmt: skip


class Chromium:
    """One page. `problems` has what its console and its network complained about; `loaded` what it asked for."""

    def __init__(self, profile):
        ours, theirs = os.pipe(), os.pipe()  # (read, write): what it reads, what it writes
        files = f"3<&{ours[0]} 4>&{theirs[1]}"
        command = [
            "bash",
            "-c",
            f'exec "$@" {files}',
            "bash",
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(ours[0], theirs[1]), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read, self._buffer, self._number = ours[1], theirs[0], b"", 0
        self._session, self._events = None, []
        self.problems, self.loaded = [], []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        answer = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard["error"]
                return heard["result"]

    def _hear(self):
        end = time.monotonic() + 120
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], max(end - time.monotonic(), 0))[0], "chromium does not answer"
            got = os.read(self._read, 1 << 16)
            assert got, "chromium has ended"
            self._buffer += got
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message):
        method, params = message.get("method"), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        ):
            self.problems.append(params)
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"])
        elif method == "Network.requestWillBeSent":
            self.loaded.append(params["request"]["url"])

    def open(self, path, *, width, height=900, dark=False):
        """Show a file, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events, self.problems, self.loaded = [], [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._hear()

    def ask(self, expression):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path):
        """What is in sight, as a PNG file."""
        made = self.call("Page.captureScreenshot", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(made["data"]))

    def close(self):
        with suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        self._process.wait(timeout=60)
        os.close(self._write)
        os.close(self._read)
