"""`naju bench stress`: how far each backend drifts from float64 while one sequence of a million tokens streams by.

The sequence comes in pieces, drawn as they are needed, and every contender carries its own state from piece to piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from naju.bench.compare import Failed, at_least_one, attempt
from naju.bench.errors import Tensors, chosen_backends
from naju.bench.measure import default_device
from naju.bench.rows import RESULTS, print_table, save_rows
from naju.bench.stress_plot import draw_drift
from naju.scan import naju_scan

HALF = 500  # tokens from one change to the next where gates alternate slowly
LENGTHS = (1000, 4000, 16_000, 65_000, 250_000, 1_000_000)
DTypeName = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[DTypeName, ...] = ("float64", "float32", "bfloat16", "float16")

# Forget logits from noise (l, d) and the places (l, 1) of its tokens in the sequence.
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "near 0": lambda noise, place: noise - 8,
    "near 1": lambda noise, place: noise + 15,  # 1 - f is about 3e-7: a token fades over three million
    "alternating": lambda noise, place: noise + torch.where(place % 2 == 0, 8.0, -8.0),
    "alternating slowly": lambda noise, place: noise + torch.where(place // HALF % 2 == 0, 15.0, -1.0),
}


@dataclass(frozen=True, kw_only=True)
class StressBench:
    """Stream one sequence through every backend in every dtype, beside float64 on the same rounded inputs."""

    lengths: tuple[int, ...] = LENGTHS
    """where errors are looked at; the last is the length of the sequence"""
    piece: int = 1000
    """tokens of one call"""
    d_inner: int = 8
    d_state: int = 8
    dtypes: tuple[DTypeName, ...] = DTYPES
    backends: tuple[str, ...] | None = None
    """by default all that can run here"""
    truth: Literal["reference", "chunked"] = "reference"
    """what computes in float64; the loop is the definition, and slow on a GPU"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""
    picture: Path | None = None
    """a PNG to draw the errors into"""


def run_stress_bench(bench: StressBench) -> None:
    rows = stress_rows(bench)
    longest = max(bench.lengths)
    print(f"relative error against float64 after {longest:,} tokens, d_inner {bench.d_inner}, d_state {bench.d_state}")
    last = [row for row in rows if row["length"] == longest]
    print_table(last, ["dtype", "backend", "gates", "y", "state", "not_finite", "reason"])
    print(f"rows appended to {save_rows('stress', rows, bench.out)}")
    if bench.picture is not None:
        draw_drift(rows, bench.picture)
        print(f"drawn into {bench.picture}")


def stress_rows(bench: StressBench) -> list[dict[str, Any]]:
    """A row for each dtype, backend, kind of gates and length."""
    lengths = sorted(at_least_one("lengths", bench.lengths))
    if bench.piece < 1 or lengths[0] < 1 or any(length % bench.piece for length in lengths):
        raise ValueError(f"lengths must be positive multiples of piece {bench.piece}, but are {bench.lengths}")
    runs = [StreamedDtype(bench, dtype) for dtype in bench.dtypes]
    rows: list[dict[str, Any]] = []
    for end, inputs in tqdm(pieces(bench, lengths[-1]), total=lengths[-1] // bench.piece, disable=None, leave=False):
        for run in runs:
            run.read(inputs)
            if end in lengths:
                rows += run.look(end)
    return rows


def pieces(bench: StressBench, length: int) -> Iterator[tuple[int, Tensors]]:
    """The place after each piece, and its tensors in float64: a row of the batch for each kind of gates."""
    generator = torch.Generator(bench.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device=bench.device)
    wide, narrow = (len(GATES), bench.piece, bench.d_inner), (len(GATES), bench.piece, bench.d_state)
    for begin in range(0, length, bench.piece):
        place = torch.arange(begin, begin + bench.piece, device=bench.device).unsqueeze(1)
        f_logit = torch.stack([gates(noise, place) for gates, noise in zip(GATES.values(), draw(wide), strict=True)])
        drawn = {"h": draw(wide), "f_logit": f_logit, "i_logit": draw(wide) - 1, "B": draw(narrow), "C": draw(narrow)}
        yield begin + bench.piece, drawn


class StreamedDtype:
    """All backends on the inputs rounded to one dtype, and the truth about them."""

    def __init__(self, bench: StressBench, dtype: DTypeName) -> None:
        self.bench, self.dtype, self.truth = bench, dtype, Contender(bench.truth)
        names = chosen_backends(bench.backends, bench.device)
        # The truth in its own dtype is no contender.
        self.contenders = [Contender(name) for name in names if (name, dtype) != (bench.truth, "float64")]

    def read(self, inputs: Tensors) -> None:
        rounded = {name: tensor.to(getattr(torch, self.dtype)) for name, tensor in inputs.items()}
        want = self.truth.read({name: tensor.double() for name, tensor in rounded.items()})
        for contender in self.contenders:
            contender.compare(rounded, want)

    def look(self, length: int) -> list[dict[str, Any]]:
        bench = self.bench
        about = {"bench": "stress", "length": length, "piece": bench.piece, "d_inner": bench.d_inner}
        about |= {"d_state": bench.d_state, "dtype": self.dtype}
        return [about | row for contender in self.contenders for row in contender.look(self.truth.state)]


class Contender:
    """One backend: the state it carries and, for each kind of gates, how far its outputs were off since the last look.

    One that fails says why and is out.
    """

    def __init__(self, name: str) -> None:
        self.name, self.state, self.failed = name, None, None
        self._begin_window()

    state: Tensor | None
    failed: Failed | None

    def _begin_window(self) -> None:
        self.off, self.size, self.not_finite = (torch.zeros(len(GATES), dtype=torch.float64) for _ in range(3))

    @torch.no_grad()
    def read(self, inputs: Tensors) -> Tensor:
        y, self.state = naju_scan(**inputs, initial_state=self.state, backend=self.name)  # type: ignore[arg-type]
        return y

    def compare(self, inputs: Tensors, want: Tensor) -> None:
        if self.failed is not None:
            return
        y = attempt(partial(self.read, inputs))
        if isinstance(y, Failed):
            self.failed = y
            return
        self.off += _squares(y.double() - want)
        self.size += _squares(want)
        self.not_finite += (~y.isfinite()).sum((1, 2)).cpu()

    def look(self, truth: Tensor | None) -> list[dict[str, Any]]:
        """A row for each kind of gates: the error of all outputs since the last look, and of the state as it is."""
        if self.failed is not None or self.state is None or truth is None:
            return [{"backend": self.name, "reason": self.failed.reason if self.failed else "nothing was read"}]
        of_state = (_squares(self.state.double() - truth) / _squares(truth)).sqrt()
        of_y = (self.off / self.size).sqrt()
        measured = zip(GATES, of_y.tolist(), of_state.tolist(), self.not_finite.tolist(), strict=True)
        self._begin_window()
        return [
            {"backend": self.name, "gates": gates, "y": _or_none(y), "state": _or_none(state), "not_finite": int(count)}
            for gates, y, state, count in measured
        ]


def _squares(tensor: Tensor) -> Tensor:
    """Their sum in each row of the batch."""
    return tensor.square().sum((1, 2)).cpu()


def _or_none(error: float) -> float | None:
    return error if math.isfinite(error) else None
