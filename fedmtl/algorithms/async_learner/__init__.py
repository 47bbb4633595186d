"""The asynchronous central learner (Farokhi et al. 2021), and learners of one answer."""
