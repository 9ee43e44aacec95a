"""Reads back what a benchmark has written."""

import json
from pathlib import Path
from typing import Any


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
