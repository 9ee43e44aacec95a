"""Every mixer by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from naju.mixers.attention import AttentionMixer
from naju.mixers.base import Mixer
from naju.mixers.coupled import CoupledMixer
from naju.mixers.gla import GLAMixer
from naju.mixers.hgrn import HGRNMixer
from naju.mixers.mamba import MambaMixer
from naju.mixers.mamba2 import Mamba2Mixer
from naju.mixers.mlstm import MLSTMMixer
from naju.mixers.naju import NajuMixer
from naju.mixers.retnet import RetNetMixer
from naju.mixers.rwkv import RWKVMixer
from naju.mixers.transformer import TransformerMixer

MIXERS: Mapping[str, type[Mixer]] = {
    "naju": NajuMixer,
    "coupled": CoupledMixer,
    "attention": AttentionMixer,
    "transformer": TransformerMixer,
    "hgrn": HGRNMixer,
    "mamba": MambaMixer,
    "mamba2": Mamba2Mixer,
    "gla": GLAMixer,
    "retnet": RetNetMixer,
    "mlstm": MLSTMMixer,
    "rwkv": RWKVMixer,
}


def build_mixer(name: str, d_model: int, **options: Any) -> Mixer:
    """The mixer called `name`; an unknown name or option lists the known ones."""
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}; expected one of {', '.join(MIXERS)}")
    known = set(_options(MIXERS[name]))
    unknown = set(options) - known - set(getattr(MIXERS[name], "REFUSED", ()))
    if unknown:
        raise TypeError(f"mixer {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    for option, value in {"d_model": d_model, **options}.items():
        _check_type(name, option, value)
    return MIXERS[name](d_model, **options)


def _check_type(name: str, option: str, value: Any) -> None:
    """Options come from files and command lines, too."""
    wanted = next((hints[option] for hints in _hints(MIXERS[name]) if option in hints), Any)
    kinds = [get_origin(kind) or kind for kind in get_args(wanted) or (wanted,)]
    allowed = tuple({bool: Integral, int: Integral, float: Real}.get(kind, kind) for kind in kinds)
    if wanted is not Any and (not isinstance(value, allowed) or isinstance(value, bool) > (bool in kinds)):
        articles = {NoneType: "None", int: "an int"}
        told = " or ".join(articles.get(kind, f"a {kind.__name__}") for kind in kinds)
        raise TypeError(f"{option} must be {told}, but is {type(value).__name__} in the options of mixer {name!r}")
    if option.startswith(("expand", "feed_forward")) and not math.isfinite(value):  # a width is made of it
        raise ValueError(f"{option} must be finite, but is {value} in the options of mixer {name!r}")


def _hints(mixer: type[Mixer]) -> list[dict[str, Any]]:
    """Of its constructor and those that it passes options on to."""
    constructors = [vars(made).get("__init__") for made in mixer.__mro__ if issubclass(made, Mixer)]
    return [get_type_hints(constructor) for constructor in constructors if constructor is not None]


def _options(mixer: type[Mixer]) -> list[str]:
    """Keyword options of a mixer, those it passes on to the mixer it extends included."""
    parameters = inspect.signature(mixer.__init__).parameters.values()
    own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    inherited = _options(mixer.__mro__[1]) if passes_on else []
    return own + [name for name in inherited if name not in getattr(mixer, "REFUSED", ())]
