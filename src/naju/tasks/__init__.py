"""Tasks under one protocol: `sample(count, length, generator)`, classified at the last position or at many."""

from naju.tasks.base import IGNORE, Batch, Task
from naju.tasks.registry import TASKS, build_task

__all__ = ["IGNORE", "TASKS", "Batch", "Task", "build_task"]
