"""The asynchronous central learner (Farokhi et al. 2021)."""
