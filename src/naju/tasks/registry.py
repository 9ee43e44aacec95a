"""Every task by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from naju.tasks.base import Task
from naju.tasks.key_value import KeyValueRetrieval, ScatteredKeyValueRetrieval
from naju.tasks.mqar import MultiQueryRecall
from naju.tasks.state_tracking import CurrentStateTracking, RecencyStateTracking

TASKS: Mapping[str, type[Task]] = {
    "T1": KeyValueRetrieval,
    "T2": ScatteredKeyValueRetrieval,
    "T3": CurrentStateTracking,
    "T4": RecencyStateTracking,
    "MQAR": MultiQueryRecall,
}


def build_task(name: str, **options: Any) -> Task:
    """The task called `name`; an unknown name or option lists the known ones."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; expected one of {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]  # type: ignore[arg-type]
    unknown = set(options) - set(known)
    if unknown:
        raise TypeError(f"task {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    return TASKS[name](**options)
