"""The synthetic problems of the papers."""
