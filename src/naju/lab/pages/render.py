"""Templates to files. jinja2 is imported when a page is made: the library itself runs without it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naju.lab.pages.chart import colour, dash, outline
from naju.training.files import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)


def write_page(path: Path, page: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


@cache
def environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("pages need jinja2; install it with: pip install 'naju[report]'") from error
    made = Environment(
        loader=PackageLoader("naju.lab.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(colour=colour, outline=outline, dash=dash)
    made.filters["share"] = _share
    made.filters["signed"] = _signed
    made.filters["coded"] = _coded
    return made


def _coded(text: str) -> str:
    """Escaped, with `commands` as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _share(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}"


def _signed(value: float, digits: int = 2) -> str:
    """With a real minus sign, and without a sign where it rounds to zero."""
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else "−") + text
