"""Why accuracy fades as sequences grow: the same questions with the gates at tokens that do not matter made to hold, to
write nothing, or both.

A longer sequence with as many events has nothing but more padding, one that is full of events (T3) more of those that
nobody asks about. If the memory decays there, holding (f = 1) brings the answers back; if what is written there drowns
it, writing nothing (i = 0) does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.lab.diagnostic_run import load_run_model
from naju.lab.diagnostics import aligned
from naju.lab.inspect.layers import gated_layers
from naju.lab.runs import RunStore
from naju.mixers.naju import NajuMixer, ScanArguments
from naju.models import Classifier
from naju.models.device import usable_device
from naju.models.pooling import pooled
from naju.models.sampling import check_seed
from naju.scan import naju_scan
from naju.tasks.events import EVENT_LENGTH, PAD, QUERY_LENGTH, SEP, EventTask
from naju.training import seeded_generator

TOKENS_AT_ONCE = 2**16


@dataclass(frozen=True, kw_only=True)
class FadingConfig:
    """Why a run's accuracy fades with the length: what idle tokens do to the memory, and the answers without that."""

    name: str
    """As `naju runs ls` prints it; of a naju or a coupled mixer on T1 to T4."""
    runs: Path = Path("runs")
    """Folder of the run store."""
    at: Literal["padding", "others"] = "padding"
    """Which tokens are idle: padding, or padding and the events of all entities but the one that is asked for."""
    lengths: tuple[int, ...] = ()
    """Lengths of the sequences; by default those that the run was tested at."""
    layers: tuple[int, ...] = ()
    """Layers whose gates are changed and told, counted from 0; by default all."""
    sequences: int = 500
    """How many at each length."""
    seed: int = 0
    """The same seed gives the same sequences."""
    device: str = "auto"
    """Where to compute; "auto" is the GPU where there is one."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


class Way(NamedTuple):
    """What idle tokens are made to do."""

    holds: bool
    writes_nothing: bool


WAYS = {
    "as it is": Way(False, False),
    "holding": Way(True, False),
    "writing nothing": Way(False, True),
    "both": Way(True, True),
}


class Idling(NamedTuple):
    """What the idle tokens of each sequence do in one layer."""

    fading: Tensor  # (b, d): -log f summed over them
    write: Tensor  # (b,): i, mean over them and channels
    share: Tensor  # (b,): of the memory's squared norm when the question begins


Change = Callable[[int, ScanArguments], ScanArguments]
Places = Callable[[Tensor], Tensor]


def padding(tokens: Tensor) -> Tensor:
    """Where it stands in the sequences (b, l)."""
    return tokens == PAD


def padding_and_others(tokens: Tensor) -> Tensor:
    """Where nothing stands that the answer depends on."""
    asked = tokens[:, -QUERY_LENGTH:].amax(1, keepdim=True)  # the other tokens of a query are special ones
    ends = (tokens == SEP) & (tokens.roll(EVENT_LENGTH - 2, 1) != asked)  # an event's second token is its entity
    return padding(tokens) | torch.stack([ends.roll(-back, 1) for back in range(EVENT_LENGTH)]).any(0)


IDLE: dict[str, Places] = {"padding": padding, "others": padding_and_others}


def run_fading(config: FadingConfig) -> None:
    folder = RunStore(config.runs).find(config.name)
    model, task = load_run_model(folder.path)
    if not isinstance(task, EventTask):
        raise ValueError(f"run must be of one of the event tasks T1 to T4, but is of {folder.config()['task']!r}")
    layers, device, idle = gated_layers(model, config.layers), usable_device(config.device), IDLE[config.at]
    model = model.to(device)
    accuracies = [["length", *WAYS]]
    idlings = [["length", "layer", "fading: best tenth", "median", "write gate", "share of the memory"]]
    for length in config.lengths or folder.config()["test_lengths"]:
        generator = seeded_generator(config.seed, f"fading at length {length}")
        tokens, targets, _ = (part.to(device) for part in task.sample(config.sequences, length, generator))
        right = [accuracy(model, tokens, targets, idle, way, layers) for way in WAYS.values()]
        accuracies.append([str(length), *(f"{share:.3f}" for share in right)])
        for number, idling in watch(model, tokens, idle, layers).items():
            idlings.append([str(length), str(number), *_told(idling)])
    print(f"{aligned(accuracies)}\n\n{aligned(idlings)}")


def _told(idling: Idling) -> list[str]:
    """The fading by channels: a mean would be that of the few that forget everything at once."""
    best, median = idling.fading.mean(0).quantile(idling.fading.new_tensor([0.1, 0.5])).tolist()
    write, share = idling.write.mean().item(), idling.share.mean().item()
    return [f"{best:.2f}", f"{median:.2f}", f"{write:.3f}", f"{share:.3f}"]


def accuracy(
    model: Classifier, tokens: Tensor, targets: Tensor, idle: Places, way: Way, layers: Collection[int]
) -> float:
    logits = [changed(model, piece, made_to(way, idle(piece), layers)) for piece in _pieces(tokens)]
    return (torch.cat(logits).argmax(-1) == targets).double().mean().item()


def watch(model: Classifier, tokens: Tensor, idle: Places, layers: Collection[int]) -> dict[int, Idling]:
    """By layer, for the sequences (b, l)."""
    seen: dict[int, list[Idling]] = {number: [] for number in layers}
    for piece in _pieces(tokens):
        places = idle(piece)

        def note(number: int, given: ScanArguments, places: Tensor = places) -> ScanArguments:
            if number in seen:
                seen[number].append(measure(given, places))
            return given

        changed(model, piece, note)
    return {number: Idling(*map(torch.cat, zip(*parts, strict=True))) for number, parts in seen.items()}


@torch.no_grad()
def changed(model: Classifier, tokens: Tensor, change: Change) -> Tensor:
    """The model's logits where `change` has the last word on what every layer scans."""
    u = model.backbone.embedding(tokens)
    for number, block in enumerate(model.backbone.blocks):
        mixer = block.mixer
        assert isinstance(mixer, NajuMixer)
        *drive, z = change(number, mixer.scan_arguments(block.norm(u)))  # type: ignore[operator]
        y, _ = naju_scan(*drive, z=z, D=mixer.D, alpha=mixer.alpha)
        u = u + mixer.project_out(y)
    return model.head(pooled(model.backbone.norm(u), None, model.config.pooling))  # type: ignore[no-any-return]


def made_to(way: Way, places: Tensor, layers: Collection[int]) -> Change:
    """At these places (b, l), in these layers."""
    there = places.unsqueeze(-1)

    def change(number: int, given: ScanArguments) -> ScanArguments:
        if number in layers and way.holds:
            given = given._replace(f_logit=given.f_logit.masked_fill(there, math.inf))
        if number in layers and way.writes_nothing:
            given = given._replace(i_logit=given.i_logit.masked_fill(there, -math.inf))
        return given

    return change


def measure(given: ScanArguments, places: Tensor) -> Idling:
    """At these places (b, l). A memory is the sum of what its tokens wrote, so two scans take it apart."""
    fading = (-F.logsigmoid(given.f_logit)).mul(places.unsqueeze(-1)).sum(1)
    write = given.i_logit.sigmoid().mean(-1).mul(places).sum(1) / places.sum(1).clamp_min(1)
    own, others = (_size_written_at(given, there) for there in (places, ~places))
    return Idling(fading, write, own / (own + others))


def _size_written_at(given: ScanArguments, places: Tensor) -> Tensor:
    """The squared norm (b,) of what is left of the writes at `places` when the question begins."""
    h, f_logit, i_logit, B, C, _ = (part[:, :-QUERY_LENGTH] for part in given)
    _, x = naju_scan(h, f_logit, i_logit.masked_fill(~places[:, :-QUERY_LENGTH, None], -math.inf), B, C)
    return x.square().sum((1, 2))


def _pieces(tokens: Tensor) -> Sequence[Tensor]:
    return torch.split(tokens, max(1, TOKENS_AT_ONCE // tokens.shape[1]))
