"""One browser for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    made = Browser()
    made.driver.set_script_timeout(120)
    yield made
    made.driver.quit()
