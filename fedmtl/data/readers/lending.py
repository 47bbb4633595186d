"""LendingClub loans: the interest rate, predicted from the facts that were known before pricing.

The regression of Farokhi, Wu, Smith, Kaafar: "The cost of privacy in asynchronous
differentially-private machine learning", IEEE TIFS 2021, section V-A, on the openly published table
of 10,000 loans. The last rows are public: they fit the coding, and nothing is fitted on the
clients' rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..._check import positive, positive_int
from ..dataset import FederatedDataset
from ..examples import Domain
from ..loaders import reader, with_settings
from .bounded_rows import clip_rows
from .cells import codes
from .columns import Table
from .dealing import DealtTable, assemble, clip_targets, deal_table, texts_of
from .table_files import find_file
from .whitening import fit_whitening

FILES = ("loans_full_schema.csv.gz", "loans_full_schema.csv")
TARGET = "interest_rate"
RATES = (0.0, 100.0)
"""Accepted interest rates, in percent a year."""

CATEGORIES = (
    "state",
    "homeownership",
    "verified_income",
    "verification_income_joint",
    "loan_purpose",
    "application_type",
)
MISSING = ("NA", "NaN", "nan", "")
"""Texts that stand for a value that is not there."""
NUMBERS = (
    "emp_length",
    "annual_income",
    "debt_to_income",
    "annual_income_joint",
    "debt_to_income_joint",
    "delinq_2y",
    "months_since_last_delinq",
    "earliest_credit_line",
    "inquiries_last_12m",
    "total_credit_lines",
    "open_credit_lines",
    "total_credit_limit",
    "total_credit_utilized",
    "num_collections_last_12m",
    "num_historical_failed_to_pay",
    "months_since_90d_late",
    "current_accounts_delinq",
    "total_collection_amount_ever",
    "current_installment_accounts",
    "accounts_opened_24m",
    "months_since_last_credit_inquiry",
    "num_satisfactory_accounts",
    "num_accounts_120d_past_due",
    "num_accounts_30d_past_due",
    "num_active_debit_accounts",
    "total_debit_limit",
    "num_total_cc_accounts",
    "num_open_cc_accounts",
    "num_cc_carrying_balance",
    "num_mort_accounts",
    "account_never_delinq_percent",
    "tax_liens",
    "public_record_bankrupt",
    "loan_amount",
    "term",
)
DROPPED = {
    "rownames": "an identifier",
    "emp_title": "free text, nearly an identifier",
    "grade": "the lender's own grade, from which the rate is read off",
    "sub_grade": "the lender's own grade, from which the rate is read off",
    "installment": "computed from the rate, the amount and the term",
    "issue_month": "known only when the loan is made",
    "initial_listing_status": "decided after the rate",
    "disbursement_method": "decided after the rate",
    "loan_status": "known only after the loan was made",
    "balance": "known only after the loan was made",
    "paid_total": "known only after the loan was made",
    "paid_principal": "known only after the loan was made",
    "paid_interest": "known only after the loan was made",
    "paid_late_fees": "known only after the loan was made",
}
"""The columns that are never features, with the reason."""


@dataclass(frozen=True)
class LendingSettings(DealtTable):
    """Settings of :func:`~fedmtl.data.read_lending`, which takes them as its arguments.

    Args:
        root: the .csv or .csv.gz file, or its folder.
        clients: their number N; ids ``owner-0``, ``owner-1``, ...
        sizes: loans of each client, training and test together: None for all in N equal parts, one
            number for all clients, or one number a client.
        public_rows: the last rows of the file, taken as public; they belong to no client.
        components: principal components k.
        z_clip: bound on a column's z-score.
        l1: bound on ``||x||_1`` of the k features, a public constant; longer rows are scaled down.
        test_fraction: share of each client's loans held out for test; None trains on all of them
            and tests every client on the public rows.
        seed: of the deal and of the split.
        l2: bound on ``||x||_2``, a public constant, likewise.
        target: bound on ``|y|``, a public constant; a larger ``|y|`` is cut there. y is the
            interest rate minus the public rows' mean, over their standard deviation.
    """

    l2: float = 5.0
    target: float = 4.0


@reader("lending")
@with_settings(LendingSettings)
def read_lending(settings: LendingSettings) -> FederatedDataset:
    """Reads loans_full_schema.csv and deals its loans to clients.

    Args:
        settings: the fields of :class:`~fedmtl.data.LendingSettings`, each an argument of its own:
            ``read_lending("loans_full_schema.csv", clients=5, l2=3.0)``.

    Returns:
        Features (k,) and targets, float32.

    Raises:
        DataError: an unreadable file, a missing column, a value that is no number, an empty or
            impossible rate.
        ConfigError: an impossible setting.
    """
    where = "lending"
    l1 = settings.l1
    l2 = settings.l2
    target = settings.target
    components = settings.components
    public_rows = settings.public_rows
    positive(where, z_clip=settings.z_clip, target=target, l1=l1, l2=l2)
    positive_int(where, components=components)
    file = find_file(settings.root, FILES)
    table = Table.of(file, CATEGORIES)
    table.check_columns((TARGET, *CATEGORIES, *NUMBERS))
    parts = deal_table(len(table), settings, where=where, file=file)
    public = slice(len(table) - public_rows, None)
    rates = table.numbers(TARGET, low=RATES[0], high=RATES[1])
    coded = _coded(table, public)
    whiten = fit_whitening(
        coded[public], components=components, z_clip=settings.z_clip, where=where
    )
    x = clip_rows(whiten(coded), l1=l1, l2=l2)
    # of public rows alone, so that the scale of the target costs no privacy
    middle = rates[public].mean()
    spread = rates[public].std()
    if spread == 0:
        spread = 1.0
    y = clip_targets((rates - middle) / spread, target)
    note = (
        f"the last {public_rows} loans of the file are taken as public: they fitted the integer "
        f"codes, the z-scores, the {components} principal components and the scale of the target, "
        "and no epsilon covers them; the number of loans of each client is public"
    )
    data = assemble(
        x,
        y,
        parts,
        public,
        test_fraction=settings.test_fraction,
        seed=settings.seed,
        classes=None,
        name="lending",
    )
    return replace(data, domain=Domain(l1, l2, target), notes=(note,), verify=False)


def _coded(table: Table, public: slice) -> np.ndarray:
    """Returns (n, p) float64: the numbers of the categories that public rows have, in their order,
    then the columns of numbers; NaN if a value is missing, or a category that no public row
    has."""
    columns = []
    for column in CATEGORIES:
        values = texts_of(table, column)
        # categories that only private rows have are missing values, and stay unknown
        code = codes(values, [text for text in np.unique(values[public]) if text not in MISSING])
        columns.append(np.where(code >= 0, code, np.nan))
    return np.stack([*columns, *(_numbers(table, column) for column in NUMBERS)], axis=1)


def _numbers(table: Table, column: str) -> np.ndarray:
    """Returns a column of numbers, float64 (n,), with NaN if a value is missing."""
    missing = np.isin(texts_of(table, column), MISSING)
    # 0 stands in, so that the check of numbers finds wrong texts and not the gaps
    filled = table.frame.assign(**{column: table.frame[column].mask(missing, 0)})
    return np.where(missing, np.nan, replace(table, frame=filled).numbers(column))
