"""Results as runs write them, with numbers drawn from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from naju.lab.diagnostics import TASKS
from naju.tasks import build_task

LENGTHS = (512, 1024, 2048, 4096)


def result(mixer: str, task: str, seed: int, *, variant: str = "default", **changes: Any) -> dict[str, Any]:
    """`changes` replace top-level values; those of the config go by the name `config`."""
    rng = random.Random(f"{mixer} {task} {seed} {variant}")

    def shares() -> dict[str, float]:
        return {bucket: rng.random() for bucket in ("all", *build_task(task).groups)}

    config = {
        "mixer": mixer,
        "task": task,
        "d_model": 128,
        "n_layers": 4,
        "length": 512,
        "batch_size": 32,
        "lr": 3e-4,
        "weight_decay": 1e-4,
        "warmup_ratio": 0.05,
        "clip": 1.0,
        "epochs": 50,
        **changes.pop("config", {}),
    }
    drawn = {
        "experiment": "diagnostics",
        "mixer": mixer,
        "task": task,
        "variant": variant,
        "seed": seed,
        "config": config,
        "parameters": 1_000_000 + 1000 * int(task[1]),
        "state_size": 16384,
        "steps": 1000,
        "seconds": rng.uniform(50, 100),
        "train_accuracy": rng.random(),
        "best_validation": rng.random(),
        "final_validation": rng.random(),
        "accuracy": {str(length): shares() for length in LENGTHS},
        "curve": [[step, 3.0 / step, rng.random() if step % 400 == 0 else None] for step in range(100, 1001, 100)],
        "machine": {"accelerator": "a device", "cores": 2},
        "when": "2030-01-01T00:00:00+00:00",
    }
    if task == "T4":
        drawn["growing"] = {str(length): shares() for length in LENGTHS[1:]}
    return drawn | changes


def write(folder: Path, *results: dict[str, Any]) -> Path:
    """Copies of result files, named as the grid names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, drawn in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(drawn))
    return folder


def some_results() -> list[dict[str, Any]]:
    """Naju with three seeds on all tasks; xLSTM and the coupled gate, which the paper lacks, with one on two."""
    naju = [result("naju", task, seed) for task in TASKS for seed in (1, 2, 3)]
    others = [result(mixer, task, 1) for mixer in ("mlstm", "coupled") for task in ("T2", "T4")]
    return naju + others
