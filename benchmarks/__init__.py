"""Studies of the published methods, and timings beside other programs."""
