"""Make sure that a Chromium is there for the browser tests; say why they will be skipped when it cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from playwright.sync_api import Error, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The shell comes first: it draws no window, toolbar or menus, which take half of a browser's processor time."""


def find_chromium() -> str | None:
    """Path of a browser on PATH, or of the one that Playwright installed."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    try:
        with sync_playwright() as playwright:
            path = playwright.chromium.executable_path
    except Error:
        return None
    return path if os.access(path, os.X_OK) else None


def install() -> None:
    """Try the system's packages where we may (root on a Debian), then Playwright's own download."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        _run(["apt-get", "update", "-qq"])
        if not _run(["apt-get", "install", "-y", "-qq", "chromium-headless-shell"]):
            _run(["apt-get", "install", "-y", "-qq", "chromium"])
    if find_chromium() is None:
        _run([sys.executable, "-m", "playwright", "install", "chromium"])


def _run(command: list[str]) -> bool:
    """Return whether the command succeeded."""
    quiet = subprocess.DEVNULL
    return subprocess.run(command, check=False, stdout=quiet, stderr=quiet, timeout=600).returncode == 0


if __name__ == "__main__":
    if find_chromium() is None:
        print("installing a Chromium for the browser tests …", flush=True)
        install()
    found = find_chromium()
    print(f"browser: {found}" if found else "no Chromium could be installed: the browser tests will be skipped")
