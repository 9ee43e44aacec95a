"""Training and evaluating any model on any task."""

from naju.training.config import Rhythm, TrainConfig
from naju.training.evaluate import Accuracy, evaluate
from naju.training.finite import NotFiniteError
from naju.training.fixed_set import FixedSet
from naju.training.journal import Journal
from naju.training.learner import Learner
from naju.training.loop import Reporter, Step, StoppedError, fit, train
from naju.training.optimizer import parameter_groups
from naju.training.seeding import seeded_generator, seeded_initialisation
from naju.training.segmented_set import Part, SegmentedSet

__all__ = [
    "Accuracy",
    "FixedSet",
    "Journal",
    "Learner",
    "NotFiniteError",
    "Part",
    "Reporter",
    "Rhythm",
    "SegmentedSet",
    "Step",
    "StoppedError",
    "TrainConfig",
    "evaluate",
    "fit",
    "parameter_groups",
    "seeded_generator",
    "seeded_initialisation",
    "train",
]
