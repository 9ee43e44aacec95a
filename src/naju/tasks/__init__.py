"""Tasks under one protocol: `sample(count, length, generator)`, classified at the last position."""

from naju.tasks.base import Batch, Task
from naju.tasks.registry import TASKS, build_task

__all__ = ["TASKS", "Batch", "Task", "build_task"]
