"""Sequence mixers under one protocol: `forward`, `step`, `init_state`, `state_size`."""

from naju.mixers.base import Mixer
from naju.mixers.naju import NajuMixer, NajuState
from naju.mixers.registry import MIXERS, build_mixer
from naju.mixers.state import State

__all__ = ["MIXERS", "Mixer", "NajuMixer", "NajuState", "State", "build_mixer"]
