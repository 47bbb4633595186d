"""Private multi-task learning by asynchronous proximal gradient (Xie et al. 2017)."""
