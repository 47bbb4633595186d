"""The asynchronous central learner (Farokhi et al. 2021), and learners of one answer."""

from .algorithm import AsyncLearner
from .one_answer import Moments, PublicStart
from .published import PublishedAsyncLearner

__all__ = ["AsyncLearner", "Moments", "PublicStart", "PublishedAsyncLearner"]
