"""Private methods as they were published, with claims of privacy that do not hold: for comparisons only."""
