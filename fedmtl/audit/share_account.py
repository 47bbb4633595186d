"""Checks of a node's own account of its shares in secure sums, by the ledger on its disk.

Such an account is of all runs that the node took part in, for any server, so there is no report
beside it: the spent epsilon is computed here, from the charges and the cost in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._rounding import rounded_up
from ..errors import DataError
from ..privacy.accounting.library import TOLERANCE
from ..privacy.chain import Chain, Head, head_file, parse
from ..privacy.cost import PrivacyCost
from ..privacy.ledger_file import VERSION
from ..privacy.samplers import SHIFTS
from ..trainer.folder import RunFolder
from ..trainer.untrusted_files import UntrustedFiles
from .claim import Shares
from .finished_run import Answer
from .lines import Reading

ACCOUNT = "noise shares"
_MOST_ROSTER = 1 << 20  # a ledger is given by others, and must not make a verification endless
_MOST_SUMS = 1 << 20


@dataclass(frozen=True)
class ShareLedger:
    """The ledger of a node's shares.

    Attributes:
        folder: of the node.
    """

    folder: RunFolder

    @cached_property
    def files(self) -> UntrustedFiles:
        """Returns the files of the folder."""
        return UntrustedFiles(self.folder.root)

    @cached_property
    def chain(self) -> Chain:
        """Returns the lines of the ledger.

        Raises:
            ResumeError: a line that does not follow the one before.
            DataError: the last line is torn, or there is none.
        """
        content = self.files.content(self.folder.ledger)
        chain = parse(content, self.folder.ledger, VERSION)
        if chain.size < len(content):
            raise DataError("the last line is torn; the node drops it at its next answer.")
        if not chain.lines:
            raise DataError("the ledger has no line.")
        return chain

    @property
    def header(self) -> Mapping[str, Any]:
        """Returns the first line."""
        return self.chain.lines[0]

    @cached_property
    def cost(self) -> PrivacyCost:
        """Returns the cost of a share."""
        (kind,) = self.header["kinds"]
        return PrivacyCost.from_dict(kind["cost"])

    @property
    def multiplier(self) -> float:
        """Returns z of the sum."""
        return float(self.header["kinds"][0]["multiplier"])

    @cached_property
    def ledger(self) -> Reading:
        """Returns the charges, as those of a run with one client."""
        about = {"accounts": 1, "delta": self.cost.delta, "privacy": {}}
        return Reading([{**self.header, **about}, *self.chain.lines[1:]])

    @property
    def used(self) -> int:
        """Returns the shares that are charged."""
        return int(self.ledger.uses[0])

    @cached_property
    def epsilon(self) -> float:
        """Returns the epsilon of all shares that are charged, by the package's own accountant."""
        if self.used > _MOST_SUMS:
            raise DataError(f"{self.used:,} charges are too many to compute their cost.")
        return self.cost.epsilon(self.used, self.multiplier)


def check_chain(account: ShareLedger) -> Answer:
    """Checks that every line has the hash of the one before."""
    lines = len(account.chain.lines)
    return [], f"{lines} lines of the ledger, each with the hash of the one before"


def check_head(account: ShareLedger) -> Answer:
    """Compares the ledger with its head file, which no roll-back of the ledger alone changes."""
    place = head_file(account.folder.ledger)
    head = Head.parse(account.files.text(place))
    if head is None or not account.chain.has(head):
        return [f"the ledger does not have the line that {place.name} has recorded"], ""
    return [], f"line {head.lines} is the head in {place.name}"


def check_settings(account: ShareLedger) -> Answer:
    """Computes the sensitivity, the grid and the slack of the noise again from the facts of the
    header."""
    header = account.header
    wrong = []
    sensitivity = float(header["clip_norm"]) * SHIFTS[header["relation"]]
    if header["sensitivity"] != sensitivity:
        wrong.append(f"the sensitivity is {header['sensitivity']}, its clip makes {sensitivity}")
    roster = int(header["max_roster"])
    missing = int(header["missing"])
    if not 0 < roster <= _MOST_ROSTER or roster * (missing + 1) > _MOST_ROSTER:
        raise DataError(f"rosters of {roster:,} clients, {missing:,} missing, cannot be checked.")
    shares = Shares(roster, header["colluding"], missing, header["bits"], header.get("units"))
    std = account.multiplier * sensitivity
    width = shares.width(std, header["clip_norm"])
    if account.cost.cells > std / width:
        wrong.append(
            f"the cost assumes {account.cost.cells:,} cells in the deviation of the noise, the "
            f"grid has {int(std / width):,}"
        )
    cost = account.cost
    if cost.law != "gaussian" or cost.sizes != (header["release"][1],) or cost.sums != 1:
        wrong.append("the cost is not that of one Gaussian sum of the size of the release")
    if cost.sampled < 1 and header.get("unit") != "record":
        wrong.append("the cost is amplified, and the server knows which clients take part")
    share = shares.deviation(std, width)
    text = (
        f"noise of multiplier {account.multiplier:.5g} at a clip norm of {header['clip_norm']:g}, "
        f"relation {header['relation']}: a share of {share:,} cells by each of {roster:,} clients, "
        f"of whom {header['colluding']:,} may collude and {missing:,} be missing"
    )
    return wrong, text


def check_charges(account: ShareLedger) -> Answer:
    """Checks the order of the charges, and their cap."""
    cap = account.header["kinds"][0]["cap"]
    wrong = account.ledger.problems()
    return wrong, f"{account.used:,} shares, each charged once, of {cap:,} that were planned"


def check_epsilon(account: ShareLedger) -> Answer:
    """Composes the cost of all charged shares by dp-accounting."""
    unit = account.header.get("unit", "client")
    text = f"{rounded_up(account.epsilon)} at delta = {rounded_up(account.cost.delta, 3)}, for one "
    text += f"{unit}, of all runs in this ledger"
    if account.used == 0:
        return [], text
    least = account.ledger.library_epsilon(0, account.epsilon)
    assert least is not None  # of Gaussian noise
    if account.epsilon < least * (1 - TOLERANCE) - 1e-9:
        return [f"{text}, and {least:.6g} by dp-accounting"], ""
    if account.ledger.header["replays_free"]:
        text += "; the noise is seeded, so that this is a simulation"
    return [], text


CHECKS: tuple[tuple[str, str, Callable[[ShareLedger], Answer]], ...] = (
    ("chain", "the ledger", check_chain),
    ("head", "the head file", check_head),
    ("settings", "the ledger", check_settings),
    ("charges", "the ledger", check_charges),
    ("epsilon", "the ledger", check_epsilon),
)
"""Name, files that it reads, and function of every check, in the order of the lines."""
