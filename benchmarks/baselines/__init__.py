"""The baselines of the papers that only the studies compare with: no trainer, no ledger, plain functions of data."""
