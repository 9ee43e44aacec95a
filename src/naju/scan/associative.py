"""The paper's associative operator, `(f_b, w_b) ∘ (f_a, w_a) = (f_b f_a, w_b + f_b w_a)`, as a log-depth prefix scan.

It holds every state of the sequence at once, (batch, length, d_inner, d_state): the form to read and to check with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from naju.scan.dispatch import Backend
from naju.scan.frame import one_by_one, run_core

Element = tuple[Tensor, Tensor]  # f (b, l, d, 1) and w (b, l, d, n)


def _compose(later: Element, earlier: Element) -> Element:
    return later[0] * earlier[0], later[1] + later[0] * earlier[1]


def _every_second(element: Element, start: int, stop: int | None = None) -> Element:
    return element[0][:, start:stop:2], element[1][:, start:stop:2]


def prefixes(element: Element) -> Element:
    """Every prefix composition: pair neighbours, scan the pairs (half as many), fill in the places between."""
    length = element[0].shape[1]
    if length == 1:
        return element
    even, odd = _every_second(element, 0), _every_second(element, 1)
    pairs = length // 2
    at_odd = prefixes(_compose(odd, _every_second(element, 0, 2 * pairs)))
    before = tuple(part[:, : (length - 1) // 2] for part in at_odd)
    between = _compose(tuple(part[:, 1:] for part in even), before)  # type: ignore[arg-type]
    at_even = tuple(torch.cat([first[:, :1], rest], dim=1) for first, rest in zip(even, between, strict=True))
    return _interleave(at_even[0], at_odd[0]), _interleave(at_even[1], at_odd[1])


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    pairs = odd.shape[1]
    woven = torch.stack([even[:, :pairs], odd], dim=2).flatten(1, 2)
    return torch.cat([woven, even[:, pairs:]], dim=1)


def _scan(f: Tensor, v: Tensor, B: Tensor, C: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    writes = v.unsqueeze(-1) * B.unsqueeze(-2)  # (b, l, d, n)
    kept, states = prefixes((f.unsqueeze(-1), writes))
    states = states + kept * x.unsqueeze(1)
    m = (states @ C.unsqueeze(-1)).squeeze(-1)  # (b, l, d)
    return m, states[:, -1]


_core = one_by_one(_scan)
ASSOCIATIVE = Backend(name="associative", run=lambda inputs: run_core(_core, inputs))
