"""The decoding step as a graph that runs without this library: one token and a state in, logits and a state out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from naju.layers.causal_conv import weighted_sum
from naju.layers.layout import Layout
from naju.models import LanguageModel


class FlatStep(nn.Module):
    """`LanguageModel.step` on the state's tensors instead of the state, in the order of `State.tensors`."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self._kind = model.init_state(1)

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        values = iter(state)
        logits, after = self.model.step(token, self._kind.map(lambda _: next(values)))
        return logits, *after.tensors().values()


@torch.no_grad()
def export_step(model: LanguageModel) -> ExportedProgram:
    """The step for any number of sequences, and for any past where a layer keeps one."""
    token = torch.zeros(2, dtype=torch.int64, device=model.backbone.embedding.weight.device)
    _, state = model(token.unsqueeze(1).expand(-1, 3))
    _, longer = model.step(token, state)
    examples = {name: tensor.contiguous().clone() for name, tensor in state.tensors().items()}  # no views: sizes only
    later = longer.tensors()
    open_axes = tuple(_open_axes(tensor, later[name]) for name, tensor in examples.items())
    program = torch.export.export(
        FlatStep(model), (token, *examples.values()), dynamic_shapes=({0: Dim.AUTO}, open_axes)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".isinstance.treespec", FutureWarning)  # torch warns of torch
        return program.run_decompositions({torch.ops.naju.cpu_conv.default: _conv})  # type: ignore[no-any-return]


def _open_axes(now: Tensor, later: Tensor) -> dict[int, Any]:
    """The batch, and what grows from token to token."""
    return {axis: Dim.AUTO for axis in range(now.dim()) if axis == 0 or now.shape[axis] != later.shape[axis]}


def _conv(
    u: Tensor, tail: Tensor, weights: Tensor, biases: Tensor, adds: list[Tensor], boundaries: None, silu: bool
) -> list[Tensor]:
    """The compiled convolution in torch's own operators, which is all that others know."""
    past = Layout(u.shape[0]).past(u, tail)
    sums = [weighted_sum(past, weight.t(), bias) for weight, bias in zip(weights, biases, strict=True)]
    if adds:
        sums = [add + total for add, total in zip(adds, sums, strict=True)]
    return [F.silu(total) for total in sums] if silu else sums


def save_onnx(model: LanguageModel, path: Path) -> None:
    """Inputs are `token` and the state's tensors by name, outputs `logits` and the same names with `next.` before."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"writing ONNX needs {' and '.join(missing)}; install with: pip install {' '.join(missing)}")
    names = list(model.init_state(1).tensors())
    with _quiet_exporter():
        program = torch.onnx.export(
            export_step(model),
            input_names=["token", *names],
            output_names=["logits", *(f"next.{name}" for name in names)],
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(path)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """It warns of its own internals, and of packages that nothing here needs."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
