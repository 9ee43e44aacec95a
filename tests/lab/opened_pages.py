"""Pages as their reader meets them: their tables as rows of text, and, where chromium is installed, their pixels."""

from __future__ import annotations

import re
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed")


class _Tables(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] | None = None
        self.in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.rows = self.found.setdefault(dict(attrs).get("id") or "", [])
        elif tag == "tr" and self.rows is not None:
            self.rows.append([])
        elif tag in ("td", "th") and self.rows is not None:
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False
        elif tag == "table":
            self.rows = None

    def handle_data(self, data: str) -> None:
        if self.in_cell and self.rows:
            self.rows[-1][-1] += f" {data}"


def tables(page: str) -> dict[str, list[list[str]]]:
    """Every table by its id: rows of cells, their text with single blanks."""
    parser = _Tables()
    parser.feed(page)
    return {name: [[" ".join(cell.split()) for cell in row] for row in rows] for name, rows in parser.found.items()}


def opened(page: Path) -> str:
    """The document as the browser has it after running whatever there is to run."""
    return _chromium("--dump-dom", page.resolve().as_uri())


def width_needed(page: Path, width: int) -> int:
    """How wide the page has to be for all that does not scroll by itself, on a screen of this width."""
    measured = "<script>document.title = document.querySelector('main').scrollWidth</script>"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"  # which may run the script
        copy.write_text(f"{text}<style>body {{ width: {width}px }}</style>{measured}")
        return int(re.search(r"<title>(\d+)</title>", opened(copy))[1])


def pixels(page: Path, *, dark: bool = False, width: int = 1200, height: int = 1000) -> np.ndarray:
    """(height, width, 3) of the top of the page, from 0 to 1."""
    from matplotlib.image import imread

    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        scheme = ("--blink-settings=preferredColorScheme=0",) if dark else ()
        size = f"--window-size={width},{height}"
        _chromium(*scheme, size, f"--screenshot={picture}", page.resolve().as_uri())
        return np.asarray(imread(picture))[..., :3]


def share_of(picture: np.ndarray, colour: str) -> float:
    """The share of pixels that have this colour, `#rrggbb`, almost exactly."""
    wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return float((np.abs(picture - wanted).max(-1) < 0.02).mean())


def _chromium(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
