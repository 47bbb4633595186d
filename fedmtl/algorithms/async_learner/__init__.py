"""The asynchronous central learner (Farokhi et al. 2021), and learners of one answer."""

from .algorithm import AsyncLearner
from .one_answer import Moments, PublicStart

__all__ = ["AsyncLearner", "Moments", "PublicStart"]
