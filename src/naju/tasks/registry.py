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
    known = {field.name: field.default for field in fields(TASKS[name])}  # type: ignore[arg-type]
    unknown = set(options) - set(known)
    if unknown:
        raise TypeError(f"task {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    for option, value in options.items():
        _check_type(name, option, value, known[option])
    return TASKS[name](**options)


def _check_type(name: str, option: str, value: Any, default: Any) -> None:
    """Options come from files and command lines, too. All are numbers or switches, and None only where it is usual."""
    told, kind = ("a bool", bool) if isinstance(default, bool) else ("an int", int)
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not fits and not (value is None and default is None):
        raise TypeError(f"{option} must be {told}, but is {value!r} in the options of task {name!r}")
