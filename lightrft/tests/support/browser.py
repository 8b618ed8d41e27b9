"""A headless Chromium that opens one page from the disk."""
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
REMEDY = "no Chromium is on PATH: run `make browser`, which installs Debian's package"


@contextmanager
def opened(page: Path, scheme: str = "light", **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """The page in a browser of 1280 x 900, and the addresses of all requests; an error in its script fails the test.

    Without a browser the test is skipped, in CI it fails.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(REMEDY) if os.environ.get("CI") else pytest.skip(REMEDY)
    from playwright.sync_api import sync_playwright
    requests, errors = list[str](), list[str]()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found)
        tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme, **options)
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.goto(page.as_uri())
        yield tab, requests
        browser.close()
    assert errors == []
