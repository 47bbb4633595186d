"""Laws of noise, the sources of their random numbers, and the public grid of released values."""
