"""Laws of noise, where their random numbers come from, and the public grid of released values."""
