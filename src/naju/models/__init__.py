"""Models in plain torch around any registered mixer."""

from naju.models.backbone import Backbone, ModelState
from naju.models.bidirectional import BidirectionalMixer
from naju.models.classifier import Classifier
from naju.models.config import ModelConfig
from naju.models.language_model import LanguageModel
from naju.models.two_tower import TwoTower

__all__ = ["Backbone", "BidirectionalMixer", "Classifier", "LanguageModel", "ModelConfig", "ModelState", "TwoTower"]
