"""Numbers as a small picture: one pixel a number, enlarged by the page."""

from __future__ import annotations

import base64
import io

from torch import Tensor


def heat_image(values: Tensor, low: float, high: float) -> str:
    """(rows, columns) as a PNG in a data URI, from dark blue at `low` to yellow at `high`."""
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise ImportError("heat maps need matplotlib; install it with: pip install 'naju[report]'") from error
    file = io.BytesIO()
    imsave(file, values.numpy(), vmin=low, vmax=high, cmap="viridis", format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
