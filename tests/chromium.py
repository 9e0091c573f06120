"""A headless Chromium for tests that look at a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# no sandbox: containers do not allow it; the others keep the browser from calling its maker
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


@contextmanager
def chromium() -> Iterator:
    """Where there is none, the test is skipped, except in CI, where that is a fault.

    Keep it for a module at most: while Playwright runs, the main thread has an event loop, which others would meet.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        missing = f"no browser: none of {', '.join(PROGRAMS)} is installed"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()
