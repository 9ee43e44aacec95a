"""The paper's language-model experiments as grids of runs: by context, by width, by gate rank, by learning rate, and
what training costs. All runs are those of `naju lm train`; one that two tables share is trained once.

A result is labelled by the text it was trained on; only the whole of WikiText-103 is called so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from naju.lab.options import GridOptions, check_names, parse_seeds
from naju.lab.runs import Results, RunStore
from naju.lab.wikitext_models import CONTENDERS, GATE_RANKS, paper_rate
from naju.lab.wikitext_rates import RATES, Rate, chosen_rate, digest, finished_pilots, ladder
from naju.lab.wikitext_run import LANGUAGE, PILOT, SPEED, WIKITEXT, Text, WikitextRun
from naju.lm.config import Execution, LanguageRun, ModelSettings, Protocol
from naju.lm.token_files import MANIFEST


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The paper's sizes. `timed` updates are measured after `warm` ones, which are the first line of metrics."""

    n_layers: int = 6
    d_model: int = 256
    length: int = 1024
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    widths: tuple[int, ...] = (256, 512, 1024)
    tokens: int = 1_200_000_000
    pilot_tokens: int = 250_000_000
    tokens_per_update: int = 32_768
    micro_tokens: int = 8192
    warm: int = 13
    timed: int = 50


FULL = Scale()


@dataclass(frozen=True, kw_only=True)
class LanguageGrid:
    """What the commands have in common."""

    data: Path = Path("data")
    """Folder that `naju lm prepare` wrote."""
    budget: int | None = None
    """Tokens of every run, the schedule fitted into them; without it the paper's."""
    mixers: tuple[str, ...] = ()
    """Such as naju, mamba2, mamba (N=64), mamba-16 (N=16), transformer, naju-rank64; without any: the paper's."""
    seeds: tuple[str, ...] = ()
    """Numbers and ranges, such as 1-3 5; without any: the paper's."""
    compile: bool = False
    """torch.compile of every block."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Record every update as one CUDA graph; auto is on with a GPU, but for timed runs."""
    micro_tokens: int = FULL.tokens_per_update
    """Most tokens that are read at once; gradients of several such micro-batches add up to an update."""
    grid: GridOptions = field(default_factory=GridOptions)

    part: ClassVar[str] = LANGUAGE
    compared: ClassVar[tuple[str, ...]]
    paper_seeds: ClassVar[tuple[str, ...]] = ("1-3",)
    validations: ClassVar[int] = 20

    def cells(self) -> list[WikitextRun]:
        """In the order in which they are filled, given the pilots that have finished by now."""
        check_names("mixers", self.chosen_mixers, CONTENDERS)
        cells = self.cells_on(self._text())
        if len({cell.name for cell in cells}) < max(1, len(cells)):
            raise ValueError("lengths, widths, modes and seeds must name at least one run and none twice, but do not")
        return cells

    def cells_on(self, text: Text) -> list[WikitextRun]:
        raise NotImplementedError

    def _text(self) -> Text:
        """What is in the folder; where nothing is, a plan can do with the paper's."""
        if self.grid.plan and not (self.data / MANIFEST).exists():
            print(f"{self.data} has no {MANIFEST}: this is the plan for {WIKITEXT}", file=sys.stderr)
            return Text(WIKITEXT, {})
        return Text.of(self.data)

    def prepare(self) -> None:
        """Say where learning rates come from."""
        text = Text.of(self.data)
        for contender, rate in self.rates_on(text).items():
            print(f"{contender} on {text.label}: learning rate {rate.value:g}, {rate.origin}")

    @property
    def chosen_mixers(self) -> tuple[str, ...]:
        return self.mixers or self.compared

    def rates_on(self, text: Text) -> dict[str, Rate]:
        pilots = finished_pilots(Results(RunStore(self.grid.runs), PILOT, self.grid.results))
        files = digest(text.sha256)
        return {name: chosen_rate(name, text.label, pilots, files) for name in self.chosen_mixers}

    def _seeds(self) -> tuple[int, ...]:
        return parse_seeds(self.seeds or self.paper_seeds)

    def _cell(
        self,
        text: Text,
        contender: str,
        seed: int,
        lr: float,
        *,
        length: int | None = None,
        d_model: int | None = None,
        tokens: int | None = None,
    ) -> WikitextRun:
        """By default with the paper's sizes."""
        chosen = CONTENDERS[contender]
        protocol = Protocol(
            length=length or FULL.length,
            tokens=next(number for number in (self.budget, tokens, FULL.tokens) if number is not None),
            tokens_per_update=FULL.tokens_per_update,
            lr=lr,
            seed=seed,
        )
        width = d_model or FULL.d_model
        model = ModelSettings(mixer=chosen.mixer, options=chosen.options, d_model=width, n_layers=FULL.n_layers)
        language = LanguageRun(data=self.data, model=model, protocol=protocol, execution=self._execution())
        return WikitextRun(
            part=self.part, contender=contender, text=text, language=language, attention=chosen.attention
        )

    def _execution(self) -> Execution:
        device = self.grid.chosen_device()
        return Execution(
            device="cuda:0" if device == "cuda" else device,  # by its number: a worker has one GPU
            micro_tokens=self.micro_tokens,
            compile=self.compile,
            cuda_graph=self.cuda_graph,
            validations=self.validations,
            keep=2,
        )


@dataclass(frozen=True, kw_only=True)
class WikitextContext(LanguageGrid):
    """Language models by training context, 1024 to 4096, at width 256; learning rates are those of the pilots."""

    lengths: tuple[int, ...] = FULL.lengths
    """Training contexts, the first ones first."""

    compared = ("naju", "mamba2", "mamba", "transformer", "mamba-16")

    def cells_on(self, text: Text) -> list[WikitextRun]:
        rates = self.rates_on(text)
        return [
            self._cell(text, contender, seed, rates[contender].value, length=length)
            for seed in self._seeds()
            for length in self.lengths
            for contender in self.chosen_mixers
        ]


@dataclass(frozen=True, kw_only=True)
class WikitextWidth(LanguageGrid):
    """Language models by width, 256 to 1024, at context 1024; each keeps the learning rate of width 256."""

    widths: tuple[int, ...] = FULL.widths
    """Values of d_model, the first ones first."""

    compared = ("naju", "mamba2", "mamba", "transformer")

    def cells_on(self, text: Text) -> list[WikitextRun]:
        rates = self.rates_on(text)
        return [
            self._cell(text, contender, seed, rates[contender].value, d_model=width)
            for seed in self._seeds()
            for width in self.widths
            for contender in self.chosen_mixers
        ]


@dataclass(frozen=True, kw_only=True)
class LanguageGateRank(LanguageGrid):
    """Naju's gate projections in full, of rank 64 and of rank 32, as language models of width 256."""

    compared = GATE_RANKS

    def cells_on(self, text: Text) -> list[WikitextRun]:
        rates = self.rates_on(text)
        return [
            self._cell(text, name, seed, rates[name].value) for seed in self._seeds() for name in self.chosen_mixers
        ]


@dataclass(frozen=True, kw_only=True)
class LrPilot(LanguageGrid):
    """Short runs that choose each model's learning rate by validation; while the best rate is the highest, a higher one
    is tried."""

    rates: tuple[float, ...] = RATES
    """Those that are tried in any case."""

    part = PILOT
    compared = ("naju", "mamba2", "mamba", "transformer", "mamba-16")
    paper_seeds = ("1",)
    validations = 5

    def cells_on(self, text: Text) -> list[WikitextRun]:
        if not self.rates or min(self.rates) <= 0 or len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates must be different positive numbers, but are {', '.join(map(str, self.rates))}")
        climbs = ((name, seed) for seed in self._seeds() for name in self.chosen_mixers)
        return [cell for name, seed in climbs for cell in self._ladder(text, name, seed)]

    def prepare(self) -> None:
        """Nothing is chosen before it begins."""

    def _ladder(self, text: Text, contender: str, seed: int) -> list[WikitextRun]:
        results = Results(RunStore(self.grid.runs), PILOT, self.grid.results)

        def cell(rate: float) -> WikitextRun:
            return self._cell(text, contender, seed, rate, tokens=FULL.pilot_tokens)

        return [cell(rate) for rate in ladder(self.rates, lambda rate: results.get(cell(rate).name))]


@dataclass(frozen=True, kw_only=True)
class WikitextEfficiency(LanguageGrid):
    """Tokens a second and peak memory of training, plain, compiled and recorded, by context; to be run on an idle
    machine."""

    lengths: tuple[int, ...] = FULL.lengths
    """Training contexts; every micro-batch has as many tokens."""
    modes: tuple[Literal["eager", "compiled", "graph"], ...] = ("eager", "compiled")
    """graph: every update is recorded as a CUDA graph, of compiled blocks with --compile."""
    micro_tokens: int = FULL.micro_tokens
    """Tokens of a micro-batch."""

    part = SPEED
    compared = ("naju", "mamba2", "mamba", "mamba-16", "transformer", "transformer-math", *GATE_RANKS[1:])
    paper_seeds = ("1",)
    validations = 1

    def cells_on(self, text: Text) -> list[WikitextRun]:
        tokens = (FULL.warm + FULL.timed) * FULL.tokens_per_update
        return [
            self._timed(self._cell(text, name, seed, paper_rate(name), length=length, tokens=tokens), mode)
            for seed in self._seeds()
            for length in self.lengths
            for mode in self.modes
            for name in self.chosen_mixers
        ]

    def prepare(self) -> None:
        """No learning rate matters here."""

    def _timed(self, cell: WikitextRun, mode: str) -> WikitextRun:
        """With a first line of metrics after the share of warm updates; everything after it is timed."""
        warm = max(1, cell.steps * FULL.warm // (FULL.warm + FULL.timed))
        compiled = self.compile or mode == "compiled"
        graph: Literal["on", "off"] = "on" if self.cuda_graph == "on" or mode == "graph" else "off"
        execution = replace(cell.language.execution, log_every=warm, compile=compiled, cuda_graph=graph)
        return replace(cell, language=replace(cell.language, execution=execution))
