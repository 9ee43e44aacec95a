"""Training and evaluating any model on any task."""

from naju.training.config import TrainConfig
from naju.training.evaluate import Accuracy, evaluate
from naju.training.loop import Step, train
from naju.training.optimizer import parameter_groups
from naju.training.seeding import seeded_generator, seeded_initialisation

__all__ = [
    "Accuracy",
    "Step",
    "TrainConfig",
    "evaluate",
    "parameter_groups",
    "seeded_generator",
    "seeded_initialisation",
    "train",
]
