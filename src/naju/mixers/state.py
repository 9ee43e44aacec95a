"""Recurrent states: small immutable records of tensors whose first axis is the batch.

Every mixer has its own kind; a model's state is the tuple of its layers'. All of them share the operations a serving
engine or a beam search needs.
"""

from __future__ import annotations

import json
import operator
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import Tensor

FORMAT = "naju-state-1"
HELD = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
STATE_KINDS: dict[str, type[State]] = {}


@dataclass(frozen=True)
class State:
    """Base of all states. No operation changes a state in place except `restore`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        STATE_KINDS[cls.__name__] = cls

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A state of the same kind with `function` applied to every tensor."""
        return type(self)(**{field.name: _map(function, getattr(self, field.name)) for field in fields(self)})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its dotted name."""
        return dict(_named_tensors("", self))

    @property
    def batch(self) -> int:
        return next(iter(self.tensors().values())).shape[0]

    def clone(self) -> Self:
        return self.map(Tensor.clone)

    def detach(self) -> Self:
        """The same values cut off from the graph: truncated back-propagation starts here."""
        return self.map(Tensor.detach)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device (`state.to("cuda")`). Precision is the mixer's business, so a dtype is not accepted."""
        if any(isinstance(value, torch.dtype | Tensor) for value in (*args, *kwargs.values())):
            raise TypeError("State.to moves a state to a device; its precision is fixed by the mixer that made it")
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def __getitem__(self, index: Any) -> Self:
        """Some of the sequences: an index tensor (beams may repeat or reorder), a mask, a slice or one integer."""
        if index is None or index is Ellipsis or isinstance(index, tuple):
            raise TypeError(f"a state is indexed by sequence alone, but was indexed by {index!r}")
        is_one = index.dim() == 0 and index.dtype != torch.bool if isinstance(index, Tensor) else True
        if is_one and hasattr(index, "__index__"):
            index = operator.index(index)
            if not -self.batch <= index < self.batch:
                raise IndexError(f"state holds {self.batch} sequences, but sequence {index} was asked for")
            index = slice(index % self.batch, index % self.batch + 1)
        return self.map(lambda tensor: tensor[index])

    def reorder(self, index: Tensor) -> Self:
        """Sequence k of the result is sequence `index[k]` of this one."""
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def snapshot(self) -> Self:
        """A detached copy to come back to with `restore`."""
        return self.detach().clone()

    def restore(self, snapshot: Self) -> None:
        """Copy a snapshot's values back into this state's tensors."""
        mine, theirs = self.tensors(), snapshot.tensors()
        for name in mine | theirs:
            if name not in mine or name not in theirs or theirs[name].shape != mine[name].shape:
                raise ValueError(
                    f"the snapshot does not fit this state: {name} differs; a state that grows with its "
                    "context is rolled back by using the snapshot itself"
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; the name appears only when the file is complete."""
        path = Path(path)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            # Not save_file: whoever may read the folder may read the state, which that keeps to its owner.
            partial.write_bytes(serialised(tensors, metadata={"format": FORMAT, "kind": json.dumps(_kind(self))}))
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Self:
        """Read what `save` wrote; a file that is damaged or holds another kind of state is refused."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is not a naju state: its format is {metadata.get('format')!r}, not {FORMAT!r}")
        try:
            state = _build(json.loads(metadata["kind"]), "", tensors)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} does not hold a complete state: {error}") from error
        if not isinstance(state, cls):
            raise ValueError(f"{path} holds a {type(state).__name__}, but a {cls.__name__} was expected")
        batches = {name: tuple(tensor.shape[:1]) for name, tensor in state.tensors().items()}
        if len(set(batches.values())) != 1 or () in batches.values():
            raise ValueError(
                f"{path} does not hold a complete state: its tensors must have one batch, but have {batches}"
            )
        strange = {name: str(tensor.dtype) for name, tensor in state.tensors().items() if tensor.dtype not in HELD}
        if strange:
            raise ValueError(f"{path} does not hold a state: of what it has no state holds {strange}")
        return state


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return value.map(function) if isinstance(value, State) else tuple(_map(function, item) for item in value)


def _named_tensors(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix.removesuffix("."), value
    elif isinstance(value, State):
        for field in fields(value):
            yield from _named_tensors(f"{prefix}{field.name}.", getattr(value, field.name))
    else:
        for index, item in enumerate(value):
            yield from _named_tensors(f"{prefix}{index}.", item)


def _kind(value: Any) -> Any:
    """What a saved file needs to rebuild the tree: a class name with its fields, a list, or None for a tensor."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, State):
        return {"class": type(value).__name__, "fields": {f.name: _kind(getattr(value, f.name)) for f in fields(value)}}
    return [_kind(item) for item in value]


def _build(kind: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    if kind is None:
        return tensors[prefix.removesuffix(".")]
    if isinstance(kind, list):
        return tuple(_build(item, f"{prefix}{index}.", tensors) for index, item in enumerate(kind))
    values = {name: _build(item, f"{prefix}{name}.", tensors) for name, item in kind["fields"].items()}
    made = STATE_KINDS[kind["class"]](**values)
    for name, wanted in get_type_hints(type(made)).items():
        if not _is_a(wanted, values[name]):
            raise TypeError(f"{prefix}{name} is a {type(values[name]).__name__}")
    return made


def _is_a(wanted: Any, value: Any) -> bool:
    """`wanted` is a class, or a tuple of any number of one class."""
    if get_origin(wanted) is tuple:
        return isinstance(value, tuple) and value != () and all(_is_a(get_args(wanted)[0], item) for item in value)
    return isinstance(value, wanted)
