"""Privacy accounting: privacy loss distributions, their composition, and the calibration of noise
to a budget."""
