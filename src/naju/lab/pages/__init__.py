"""HTML pages that need nothing but themselves: templates, one style, charts as inline SVG, images as data URIs.

Every value is escaped, and a page's own policy forbids scripts and any request, so that a run may have any name.
"""

from naju.lab.pages.chart import Bars, Chart, Line, Point, linear, logarithmic, named
from naju.lab.pages.image import heat_image
from naju.lab.pages.render import render, write_page

__all__ = [
    "Bars",
    "Chart",
    "Line",
    "Point",
    "heat_image",
    "linear",
    "logarithmic",
    "named",
    "render",
    "write_page",
]
