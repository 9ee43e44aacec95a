"""Naju: a native-discrete selective state-space layer, in which keeping (the forget gate) and writing are separate."""

from naju.mixers import NajuMixer, NajuState
from naju.models import Classifier, LanguageModel, ModelConfig, ModelState
from naju.scan import backends, naju_scan, naju_step

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "NajuMixer",
    "NajuState",
    "backends",
    "naju_scan",
    "naju_step",
]
