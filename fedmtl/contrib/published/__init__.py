"""Methods as they were published, for comparisons.

The report of a run says if the published claim of privacy does not hold.
"""
