"""Every mixer by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

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
    return MIXERS[name](d_model, **options)


def _options(mixer: type[Mixer]) -> list[str]:
    """Keyword options of a mixer, those it passes on to the mixer it extends included."""
    parameters = inspect.signature(mixer.__init__).parameters.values()
    own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    inherited = _options(mixer.__mro__[1]) if passes_on else []
    return own + [name for name in inherited if name not in getattr(mixer, "REFUSED", ())]
