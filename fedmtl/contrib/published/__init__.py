"""Methods as published, with claims of privacy that do not hold: for comparisons only."""
