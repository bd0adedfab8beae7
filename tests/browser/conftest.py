"""A real browser against a real web process, PostgreSQL and Valkey."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.db import connections
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from controlplane.selectors import pages_trajectory
from tests.factories import PASSWORD, Workspace, furnish, make_workspace
from tests.plugin import TEST_DATABASE

CHROMIUM = Path("/usr/bin/chromium")
INSTALL = "Chromium is missing: apt-get update && apt-get install -y chromium"
MODEL_FOLDER = Path(__file__).resolve().parents[2] / "var" / "models" / "smollm2-135m-instruct"
START_TIMEOUT_S = 120

# Playwright's synchronous API runs an event loop in this thread, which Django takes for an asynchronous caller. Tests
# touch rows in another thread (`backstage`); what is left here is the flush between tests.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"

expect.set_options(timeout=30_000)
Backstage = Callable[[Callable[[], Any]], Any]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(INSTALL)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
            timeout=120_000,
        )
        yield browser
        browser.close()


def _free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the web process did not answer at {url}")


@pytest.fixture
def server(transactional_db, tmp_path, settings) -> Iterator[str]:
    """The web process as it runs in production, on the test's database and channel layer. Gives its address."""
    settings.STORE_URL = (tmp_path / "store").as_uri()
    pages_trajectory._store.cache_clear()
    port = _free_port()
    base, _, _ = os.environ["DATABASE_URL"].rpartition("/")
    environment = {**os.environ, "DATABASE_URL": f"{base}/{TEST_DATABASE}", "STORE_URL": settings.STORE_URL}
    environment.pop("DJANGO_ALLOW_ASYNC_UNSAFE")
    log = (tmp_path / "web.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE.format(port=port, prefix=TEST_DATABASE, hashers=list(settings.PASSWORD_HASHERS))],
        env=environment,
        cwd=settings.BASE_DIR,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait(f"http://127.0.0.1:{port}/login/", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()
    written = (tmp_path / "web.log").read_text()
    assert "Internal Server Error" not in written, written[-4000:]
    assert "Exception in ASGI" not in written, written[-4000:]


# The tests' channel prefix and hasher are no environment variables, so they are set the way tests/plugin.py sets them.
_SERVE = """
import django, uvicorn
from django.conf import settings
from django.db import connections
settings.CHANNEL_LAYERS["default"]["CONFIG"]["prefix"] = "{prefix}"
settings.PASSWORD_HASHERS = {hashers}
django.setup()
uvicorn.run("controlplane.asgi:application", host="127.0.0.1", port={port}, log_level="warning")
"""


@dataclass
class Watched:
    """A page, and everything that it should not have done."""

    page: Page
    base: str
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        """Go to a path of the server."""
        self.page.goto(self.base + path)

    def login(self, username: str) -> None:
        """Log in through the form."""
        self.open("/login/")
        self.page.get_by_label("Name").fill(username)
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.get_by_role("button", name="Log in").click()
        expect(self.page.locator("main h1")).to_be_visible()
        assert self.page.url == self.base + "/", self.page.locator("body").inner_text()

    def logout(self) -> None:
        """Log out through the button."""
        self.page.get_by_role("button", name="Log out").click()
        expect(self.page.get_by_role("heading", name="Log in to Slipway")).to_be_visible()

    def forgive(self, text: str) -> None:
        """Drop complaints that the test itself caused."""
        self.complaints = [complaint for complaint in self.complaints if text not in complaint]

    def check(self) -> None:
        """Raises: AssertionError for a console error, a violation of the content policy, a request elsewhere."""
        violations: list[str] = self.page.evaluate("window.__violations ?? []")
        assert self.complaints + violations == []


_NOTE_VIOLATIONS = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.__violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
"""


@pytest.fixture
def watched(chromium: Browser, server: str, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A page that notes console errors, policy violations, failed requests, and requests that leave the machine."""
    options: dict[str, Any] = getattr(request, "param", {})
    context = chromium.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    context.add_init_script(_NOTE_VIOLATIONS)
    page = context.new_page()
    page.set_default_timeout(30_000)
    watch = Watched(page, server)

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watch.complaints.append(f"console: {message.text}")

    def on_request(sent: Request) -> None:
        parts = urlsplit(sent.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != server:
            watch.complaints.append(f"left the machine: {sent.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: watch.complaints.append(f"error: {error}"))
    page.on("request", on_request)
    page.on("response", lambda got: watch.complaints.append(f"{got.status} {got.url}") if got.status >= 500 else None)
    yield watch
    watch.check()
    context.close()


@pytest.fixture
def backstage(server: str) -> Iterator[Backstage]:
    """Runs a function that touches rows, in a thread that the browser's event loop is not in."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda work: thread.submit(work).result(timeout=120)
        thread.submit(connections.close_all).result(timeout=60)


@pytest.fixture
def workspace(backstage: Backstage) -> Workspace:
    """A furnished project; with the real tokenizer where the model is converted."""
    folder = MODEL_FOLDER if MODEL_FOLDER.exists() else None
    made: Workspace = backstage(lambda: furnish(make_workspace(), train=40, heldout=3, model_folder=folder))
    return made


@pytest.fixture(autouse=True, scope="session")
def _static_root() -> None:
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
