"""The reference table of private personalization: one command a row, one CSV, one page.

    python -m benchmarks.reference list                    # the rows
    python -m benchmarks.reference run digits-fedavg       # one row
    python -m benchmarks.reference run                     # what is missing, row by row
    python -m benchmarks.reference run --quick             # all rows with one seed and two rounds
    python -m benchmarks.reference page                    # page and picture of the CSV

A row is a record of settings (:mod:`.rows`, :mod:`.studies`), a cell is a row at one epsilon.
"""
