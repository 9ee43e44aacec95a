"""How training steps are executed: recorded as CUDA graphs of compiled blocks, recorded as they are, or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from naju.training.compiled import blocks_to_compile, compiled_blocks
from naju.training.cuda_graph import recorded
from naju.training.learner import Learner

Run = Callable[[], object]


def prepared(
    steps: Sequence[Run], learner: Learner, note: Callable[[str], None], *, compiles: bool
) -> tuple[list[Run], str]:
    """The learner's steps as they will be run, and in words how: eagerly on a CPU, and where they cannot be recorded,
    which is noted. With `compiles`, blocks that are worth it are compiled first."""
    if learner.device.type != "cuda":
        return list(steps), "eager"
    before, reason = {name: tensor.clone() for name, tensor in learner.tensors().items()}, ""
    ways: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {"CUDA graph": lambda model: nullcontext()}
    if compiles and blocks_to_compile(learner.model):
        ways = {"CUDA graph of compiled blocks": compiled_blocks, **ways}
    for way, within in ways.items():
        try:
            with within(learner.model):
                return recorded(steps, learner.tensors().values()), way
        except RuntimeError as error:
            learner.restore(before)
            reason = str(error).strip().partition("\n")[0]
            note(f"no {way}: {reason}")
    return list(steps), f"eager: {reason}"
