"""One number of ours over seeds beside the paper's: means, worst seed, difference and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from naju.lab.diagnostics import Spread, spread
from naju.lab.paper import MeanStd

# The two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; the last one serves for all beyond.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# From these differences on a cell is coloured faintly, clearly, strongly.
STEPS = (0.02, 0.1, 0.3)


@dataclass(frozen=True)
class Comparison:
    """`values` are ours, a seed each, and may be none; so may the paper's cell."""

    values: tuple[float, ...]
    paper: MeanStd | None = None
    paper_seeds: int = 1

    @property
    def ours(self) -> Spread | None:
        return spread(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return self.ours.mean - self.paper.mean if self.ours and self.paper else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the difference, 95 %: Student's t with the smaller number of seeds less one as its degrees of freedom,
        which errs towards a wide one. None with a single seed of ours. The paper's own spread enters if it prints one.
        What it prints is rounded, so that its mean may be half of its last digit away, and its spread that large.
        """
        if self.difference is None or self.ours is None or self.ours.std is None or self.paper is None:
            return None
        variance, least = self.ours.std**2 / len(self.values), len(self.values)
        rounding = 0.5 * 10.0 ** -_decimals(self.paper)
        if self.paper.std is not None and self.paper_seeds > 1:
            std = max(self.paper.std, rounding)
            variance, least = variance + std**2 / self.paper_seeds, min(least, self.paper_seeds)
        half = rounding + T_95[min(least - 1, len(T_95)) - 1] * sqrt(variance)
        return self.difference - half, self.difference + half

    @property
    def shade(self) -> str:
        """The style sheet's class."""
        difference = round(self.difference or 0.0, 3)
        strength = sum(abs(difference) >= step for step in STEPS)
        return "" if strength == 0 else f"{'better' if difference > 0 else 'worse'}{strength}"

    def __str__(self) -> str:
        return "-" if self.ours is None else str(self.ours)

    def told_paper(self, digits: int = 2) -> str:
        if self.paper is None:
            return "-"
        std = "" if self.paper.std is None else f"±{self.paper.std:.{digits}f}"
        return f"{self.paper.mean:.{digits}f}{std}"

    def told_difference(self, digits: int = 3) -> str:
        """With its interval, where there is one."""
        if self.difference is None:
            return "-"
        told = f"{self.difference:+.{digits}f}"
        return told if self.interval is None else f"{told} [{_pair(self.interval, digits)}]"


def _decimals(printed: MeanStd) -> int:
    """Digits after the point, at least the two that every table of the paper has."""
    told = [f"{number:.6f}".rstrip("0") for number in (printed.mean, printed.std or 0.0)]
    return max(2, *(len(number.partition(".")[2]) for number in told))


def told_seeds(finished: int, diverged: int) -> str:
    return f"{finished} of {finished + diverged}, {diverged} diverged" if diverged else str(finished)


def _pair(interval: Sequence[float], digits: int) -> str:
    return ", ".join(f"{end:+.{digits}f}" for end in interval)
