"""Learning rates: pilots climb a ladder of rates while the best is the highest, and longer runs take the best."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from naju.lab.runs import Results
from naju.lab.wikitext_models import CONTENDERS, PILOTS, paper_rate
from naju.lab.wikitext_run import PILOT, millions

RATES = (1e-3, 2e-3, 3e-3, 4e-3)
Result = Mapping[str, Any]


class Rate(NamedTuple):
    """With where it comes from, in words."""

    value: float
    origin: str


def loss_of(result: Result) -> float:
    """Validation perplexity; infinite where it diverged."""
    found = result["validation_perplexity"]
    return math.inf if found is None else float(found)


def ladder(rates: Sequence[float], outcome: Callable[[float], Result | None]) -> list[float]:
    """The given rates, and above them as many as it takes until the best is not the highest; one more at a time, as
    soon as all below have finished. Steps are as wide as the last of the given ones."""
    tried = sorted(rates)
    step = tried[-1] - tried[-2] if len(tried) > 1 else tried[-1]
    while True:
        found = [outcome(rate) for rate in tried]
        losses = [loss_of(result) for result in found if result is not None]
        if len(losses) < len(tried) or losses[-1] > min(losses) or math.isinf(losses[-1]):
            return tried
        tried.append(float(f"{tried[-1] + step:.6g}"))


def finished_pilots(results: Results) -> list[Result]:
    """All of a run store and of the copies beside it."""
    names = {run.name for run in results.store.runs() if run.path.parent.name == PILOT}
    if results.copies is not None:
        names |= {path.stem for path in results.copies.glob("*-pilot-*.json")}
    return [result for name in sorted(names) if (result := results.get(name)) is not None]


def files_of(result: Result) -> str:
    """`digest` of the text that a run has read."""
    return digest(result["config"].get("text"))


def digest(hashes: Mapping[str, str] | None) -> str:
    """A few digits that tell the files of a text from others of its name; empty where they are not known."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:8] if hashes else ""


def chosen_rate(contender: str, text: str, pilots: Iterable[Result], files: str = "") -> Rate:
    """The best rate of the longest pilots on this text whose best is not their highest; without any, the paper's.
    Pilots on other files than these count, as long as the text has the same name, and the origin says so."""
    tuned_as = CONTENDERS[contender].tuned_as or contender
    by_budget: dict[int, list[Result]] = {}
    for pilot in pilots:
        if (pilot["mixer"], pilot["task"]) == (tuned_as, text):
            by_budget.setdefault(pilot["config"]["tokens"], []).append(pilot)
    for tokens, found in sorted(by_budget.items(), reverse=True):
        losses = by_rate(found)
        best = min(losses, key=lambda rate: losses[rate])
        if best < max(losses) and math.isfinite(losses[best]):
            other = ", on other files of that name" if files and {files_of(pilot) for pilot in found} != {files} else ""
            return Rate(best, f"the best of {len(losses)} pilots of {millions(tokens)} tokens{other}")
    owner = "the paper's" if tuned_as in PILOTS else "the paper's for naju"
    return Rate(paper_rate(tuned_as), f"{owner}; {'its pilots have not ended' if by_budget else 'it has no pilots'}")


def by_rate(pilots: Iterable[Result]) -> dict[float, float]:
    """The mean validation perplexity over seeds, rates ascending."""
    found: dict[float, list[float]] = {}
    for pilot in pilots:
        found.setdefault(pilot["config"]["lr"], []).append(loss_of(pilot))
    return {rate: fmean(losses) for rate, losses in sorted(found.items())}
