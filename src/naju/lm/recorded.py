"""An update on one GPU as one CUDA graph: launching its thousand kernels can take longer than running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from naju.lm.batches import Batch
from naju.lm.config import LanguageRun
from naju.lm.distributed import Place
from naju.lm.learner import LanguageLearner
from naju.training.execution import prepared


def records(run: LanguageRun, place: Place) -> bool:
    """Whether updates are recorded: as it is asked for, by default wherever they can be. A ValueError where they are
    asked for and cannot be: every update has to do the same with other tokens."""
    reason = None
    if place.device.type != "cuda" or place.kind != "alone":
        reason = f"but for one process on a GPU, but the device is {place.device}"
    elif run.protocol.documents == "reset":
        reason = "with documents 'reset', which cuts every update elsewhere"
    asked = run.execution.cuda_graph
    if asked == "on" and reason is not None:
        raise ValueError(f"cuda_graph must be off {reason}")
    return reason is None if asked == "auto" else asked == "on"


class RecordedUpdates:
    """`LanguageLearner.update` for batches shaped like the first, which are copied to where the graph reads them."""

    def __init__(
        self, learner: LanguageLearner, first: Sequence[Batch], note: Callable[[str], None], *, compiles: bool
    ) -> None:
        self._read = [Batch(batch.tokens.clone(), batch.targets.clone(), None) for batch in first]
        update = partial(learner.update, self._read, len(self._read))
        (self._run,), _ = prepared([update], learner, note, compiles=compiles)

    def __call__(self, batches: Iterable[Batch]) -> None:
        for read, batch in zip(self._read, batches, strict=True):
            read.tokens.copy_(batch.tokens)
            read.targets.copy_(batch.targets)
        self._run()
