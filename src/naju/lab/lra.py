"""The Long Range Arena: its cells with the paper's recipe, and its table beside the paper's and two published rows.

The recipe is six bidirectional layers of width 128 with N = 64, batches of 32, AdamW at 3e-4 with 10 % warm-up, 50
epochs (Retrieval 30), no early stopping, no augmentation, three seeds. What it leaves open is told in `CHOICES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from naju.lab.comparison import Comparison
from naju.lab.diagnostics import aligned
from naju.lab.lra_data import load_data
from naju.lab.lra_run import OUT_OF_MEMORY, VALIDATED, LraModel, LraRun
from naju.lab.options import GridOptions, check_names, parse_seeds
from naju.lab.paper import MeanStd, mean_std, paper_tables
from naju.mixers import MIXERS
from naju.tasks.lra import LRA, GeneratedTask, LraTask, Sizes
from naju.training import TrainConfig

COMPARED = ("naju", "mamba2", "mamba")
SETTINGS: Mapping[str, Mapping[str, Any]] = {mixer: {"d_state": 64} for mixer in ("naju", "coupled", "mamba2", "mamba")}
PAPER_NAMES = {"mlstm": "xlstm"}
CHOICES = (
    "What the paper leaves open is so here: N = 64 in Naju as in Mamba and Mamba-2; features are averaged over real "
    "positions, the two directions of a layer added; a block has no MLP; after the warm-up the learning rate follows a "
    "cosine to 0, weight decay is 1e-4, and gradients are clipped at 1.0, as in the diagnostic suite; every tenth "
    f"training review of Text is held out for validation, which takes {VALIDATED:,} examples on the way and all at the "
    "end; the weights that are examined are the last ones; a GPU computes in bfloat16."
)
# To see everything run without any download; nothing is learned from so little.
QUICK_TASKS, QUICK_SIZES = ("listops", "pathfinder"), Sizes(320, 32, 64)
QUICK_MODEL = {"d_model": 32, "n_layers": 2}


@dataclass(frozen=True, kw_only=True)
class Lra:
    """Long Range Arena: five classifications of 1,000 to 8,000 tokens by six bidirectional layers."""

    task: tuple[str, ...] = ()
    """Some of listops, text, retrieval, image, pathfinder; without any: all, or the quick grid's two."""
    mixers: tuple[str, ...] = COMPARED
    """Any mixers; the paper also has mlstm (its xLSTM), which ran out of memory there on the three longer tasks."""
    seeds: tuple[str, ...] = ()
    """Numbers and ranges, such as 1-3 5; without any: 1-3, or 1 for the quick grid."""
    budget: float = 1.0
    """Share of the paper's epochs that every mixer gets, with the schedule fitted into it; 0.1 is a tenth."""
    sequences: int | None = None
    """Learn from so many training examples only, spread evenly over the set."""
    checkpoint: bool = False
    """Keep less for the backward pass and compute it again: less memory, more time, the same result."""
    data: Path = Path("data")
    """Folder with aclImdb (or its archive), cifar-10-batches-py or cifar10-gray.npz, and the AAN release's tsv_data."""
    cache: Path = Path("data")
    """Folder where ListOps and Pathfinder are kept once they are generated."""
    quick: bool = False
    """ListOps and Pathfinder, once through a few examples with two small layers: minutes on a CPU, to see it run."""
    grid: GridOptions = field(default_factory=GridOptions)

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must lie in (0, 1], but is {self.budget}")
        if self.sequences is not None and self.sequences < 1:
            raise ValueError(f"sequences must be a positive integer, but is {self.sequences}")

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.task or (QUICK_TASKS if self.quick else tuple(LRA))

    def cells(self) -> list[LraRun]:
        """In the order in which they are filled: a seed of everything before the next."""
        check_names("task", self.tasks, QUICK_TASKS if self.quick else LRA)
        mixers = self.mixers or COMPARED
        check_names("mixers", mixers, MIXERS)
        seeds = parse_seeds(self.seeds or (("1",) if self.quick else ("1-3",)))
        return [self._run(LRA[task], mixer, seed) for seed in seeds for task in self.tasks for mixer in mixers]

    def _run(self, task: LraTask, mixer: str, seed: int) -> LraRun:
        device = self.grid.chosen_device()
        return LraRun(
            task=task.name,
            variant=self.variant,
            model=LraModel(
                mixer=mixer,
                mixer_options=SETTINGS.get(mixer, {}),
                checkpoint_blocks=self.checkpoint,
                **(QUICK_MODEL if self.quick else {}),
            ),
            training=self.training(task, seed, bf16=device == "cuda"),
            sizes=QUICK_SIZES if self.quick else None,
            device=device,
            data=self.data,
            cache=self.cache,
        )

    def training(self, task: LraTask, seed: int, *, bf16: bool) -> TrainConfig:
        most = QUICK_SIZES.train if self.quick else task.sizes.train
        sequences, epochs = self.sequences or most, 1 if self.quick else task.epochs
        if sequences > most:
            raise ValueError(f"sequences must be at most {most:,} for {task.name} here, but is {sequences:,}")
        epoch_steps = sequences // TrainConfig.batch_size
        return TrainConfig(
            steps=max(1, round(self.budget * epochs * epoch_steps)),
            length=task.length,
            warmup_ratio=0.1,
            seed=seed,
            sequences=sequences,
            bf16=bf16,
        )

    @property
    def variant(self) -> str:
        marks = {
            "quick": self.quick,
            f"budget{self.budget:g}": self.budget != 1,
            f"{self.sequences}-sequences": self.sequences is not None,
            "checkpointed": self.checkpoint,
        }
        return "-".join(mark for mark, differs in marks.items() if differs) or "default"

    def prepare(self) -> None:
        """Have the data at hand before many processes ask for them. What has to be read comes first: that it is absent
        should not be said after half an hour of generating something else."""
        for task in sorted((LRA[name] for name in self.tasks), key=lambda task: isinstance(task, GeneratedTask)):
            load_data(task, self.data, self.cache, QUICK_SIZES if self.quick else None)


@dataclass(frozen=True)
class LraCell:
    """One task: ours over seeds beside the paper's, or that memory did not suffice, here or there."""

    comparison: Comparison
    ran_out: bool = False
    paper_ran_out: bool = False

    @property
    def told_paper(self) -> str | None:
        if self.paper_ran_out:
            return OUT_OF_MEMORY
        return None if self.comparison.paper is None else self.comparison.told_paper(3)

    def __str__(self) -> str:
        ours = OUT_OF_MEMORY if self.ran_out and not self.comparison.values else str(self.comparison)
        return ours if self.told_paper is None else f"{ours} | {self.told_paper}"


@dataclass(frozen=True)
class LraRow:
    """A model of ours with the paper's row about it, or a row that only the paper has; `is_published` marks those that
    it took from the literature, with other recipes."""

    label: str
    cells: Mapping[str, LraCell]  # by task
    paper_average: float | None
    is_published: bool = False

    @property
    def average(self) -> float | None:
        """The plain mean over the five tasks, once all are there."""
        means = [cell.comparison.ours.mean for cell in self.cells.values() if cell.comparison.ours is not None]
        return fmean(means) if len(means) == len(LRA) else None


def lra_rows(results: Iterable[Mapping[str, Any]]) -> list[LraRow]:
    """Our models, Naju first; the rest of the paper's rows after them, those from the literature last. The quick grid
    stands beside nothing of the paper's."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["mixer"], result["variant"]), []).append(result)
    paper = {row["model"]: row for row in paper_tables()["tab:lra"].rows}
    ordered = sorted(groups.items(), key=_place)
    beside = {key: None if is_quick(key[1]) else PAPER_NAMES.get(key[0], key[0]) for key in groups}
    ours = [_our_row(*key, runs, paper.get(beside[key] or "")) for key, runs in ordered]
    shown = set(beside.values())
    alone = [_paper_row(row) for name, row in paper.items() if row["published"] or name not in shown]
    return ours + sorted(alone, key=lambda row: row.is_published)


def _place(group: tuple[tuple[str, str], Any]) -> tuple[int, str]:
    (mixer, variant), _ = group
    return list(MIXERS).index(mixer), variant


def _our_row(mixer: str, variant: str, runs: Sequence[Mapping[str, Any]], paper: Mapping[str, Any] | None) -> LraRow:
    paper = None if paper is None or paper["published"] else paper
    cells = {}
    for task in LRA:
        found = [run for run in runs if run["task"] == task]
        values = tuple(run["test_accuracy"] for run in found if run["test_accuracy"] is not None)
        comparison = Comparison(values, _cell(paper, task), 1 if paper is None else paper["n_seeds"])
        ran_out = any(run["outcome"] == OUT_OF_MEMORY for run in found)
        cells[task] = LraCell(comparison, ran_out, _ran_out(paper, task))
    return LraRow(model_label(mixer, variant), cells, None if paper is None else paper["avg"])


def is_quick(variant: str) -> bool:
    """Whether a run is of the quick grid, whose model and data are not the paper's in anything but their kind."""
    return variant.startswith("quick")


def model_label(mixer: str, variant: str) -> str:
    return mixer if variant == "default" else f"{mixer} ({variant})"


def departures(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the variants had instead of the paper's recipe, in words."""
    others = [one for one in results if one["variant"] != "default"]
    return list(dict.fromkeys(_departure(LRA[one["task"]], one["variant"], one["config"]) for one in others))


def _departure(task: LraTask, variant: str, config: Mapping[str, Any]) -> str:
    budget = f"{config['epochs']:.3g} of {task.epochs} epochs, {config['sequences']:,} of {task.sizes.train:,} examples"
    size = f"{config['n_layers']} layers of width {config['d_model']}"
    return f"{variant}, {task.name}: {budget}, {size}"


def _paper_row(row: Mapping[str, Any]) -> LraRow:
    cells = {task: LraCell(Comparison((), _cell(row, task)), paper_ran_out=_ran_out(row, task)) for task in LRA}
    origin = "published" if row["published"] else "paper"
    return LraRow(f"{row['model']} ({origin})", cells, row["avg"], bool(row["published"]))


def _ran_out(row: Mapping[str, Any] | None, task: str) -> bool:
    """Whether the paper reports that this model's memory did not suffice for a task: its other tasks have numbers."""
    return row is not None and bool(row["oom"]) and row[task] is None


def _cell(row: Mapping[str, Any] | None, task: str) -> MeanStd | None:
    return None if row is None else mean_std(row[task])


def told_lra(results: Sequence[Mapping[str, Any]]) -> str:
    """Ours as mean ± deviation (worst seed), then the paper's; the last rows are the literature's, for context. Below
    stands where the budget is not the paper's."""
    rows = [["test accuracy | paper", *LRA, "average"]]
    for row in lra_rows(results):
        average = " | ".join("-" if value is None else f"{value:.3f}" for value in (row.average, row.paper_average))
        rows.append([row.label, *(str(row.cells[task]) for task in LRA), average])
    return "\n".join([aligned(rows), *departures(results)])


def describe_lra(result: Mapping[str, Any]) -> str:
    """A result in one line."""
    if result["outcome"] == OUT_OF_MEMORY:
        return f"{OUT_OF_MEMORY}: {result['reason']}"
    shares = f"test {result['test_accuracy']:.3f} validation {result['final_validation']:.3f}"
    return f"{shares} train {result['train_accuracy']:.3f} | {result['seconds']:.0f} s"
