"""Check a finished run by its files: the hashes of the files, the chain of its ledger, every
charge, epsilon by dp-accounting, and released values on their grid.

Nothing is computed from data. The lines of the ledger are counted by code of the audit; the cost
of a use is made anew from the settings, the schedule and the releases in the ledger's header, and
dp-accounting composes it if it has the law of the noise. A check is a line: confirmed, failed or
not covered. A confirmed line says that the files agree with one another: with the whole folder at
hand all of it can be written anew, but not under a seal published before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from .._text import shown
from ..errors import DataError, FedmtlError
from ..trainer.folder import MANIFEST, RunFolder
from .cost_checks import check_budget, check_charges, check_epsilon, check_interval, check_row_noise
from .finished_run import Answer, FinishedRun, NotCovered, ledger_header
from .integrity import check_chain, check_checkpoint, check_files, check_head, check_model
from .released_values import check_grid
from .report_checks import check_fields, check_headline, check_report, check_search, check_settings
from .share_account import ACCOUNT, ShareLedger
from .share_account import CHECKS as OF_SHARES

CONFIRMED = "confirmed"
FAILED = "FAILED"
OPEN = "not covered"
_SEAL = "\n".join(
    (
        "If this seal was published when the run ended, no listed file has changed "
        "since: it is the hash of public/manifest.json,",
        "which has the hashes of the public files and of private/manifest.json, and that "
        "has those of the private files and of",
        "the ledger. Without a published seal, who can write these files can have "
        "written all of them anew. With or without",
        "it, this cannot be seen: what was untrue when it was written (other data, other "
        "code, noise that was never drawn),",
        "files that no list has (baselines, files of clients), and a second copy of the "
        "run that was continued.",
    )
)
Folder = TypeVar("Folder", FinishedRun, ShareLedger)
_LONGEST = 2000  # letters of the reason in a line


@dataclass(frozen=True)
class Check:
    """One line of a verification.

    Attributes:
        name: of the compared files or values, such as ``"chain"``.
        verdict: ``"confirmed"``, ``"FAILED"`` or ``"not covered"``.
        detail: the reason; nothing private, so that it may be published.
    """

    name: str
    verdict: str
    detail: str


@dataclass(frozen=True)
class Verification:
    """The checks of a finished run, confirmed or failed.

    Attributes:
        run: identity of the run, the hash of its ledger's first line; None without a ledger.
        seal: hash of ``public/manifest.json``, which stands for every listed file, the ledger
            included; None without that file.
        epsilon, delta: as the run reports them; epsilon is ``"inf"`` if nothing is protected.
        checks: in order.

    Example:
        >>> from fedmtl.audit import Verification
        >>> Verification(run=None, seal=None, epsilon=4.0, delta=1e-5, checks=()).fits
        True
    """

    run: str | None
    seal: str | None
    epsilon: float | str | None
    delta: float | None
    checks: tuple[Check, ...]

    @property
    def fits(self) -> bool:
        """Returns True if no check failed."""
        return all(check.verdict != FAILED for check in self.checks)

    def conclusion(self) -> str:
        """Returns the conclusion in sentences: the verdict, the facts that were not checked, and
        those that no check can see."""
        counts = Counter(check.verdict for check in self.checks)
        total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (CONFIRMED, FAILED, OPEN))
        if not self.fits:
            return f"{total}: the run does not fit."
        sentences = [f"{total}: the files that were compared agree with one another."]
        missing = [check.name for check in self.checks if check.verdict == OPEN]
        if missing:
            sentences.append(f"Not checked: {', '.join(missing)}.")
        if not any(check.name == "epsilon" and check.verdict == CONFIRMED for check in self.checks):
            sentences.append(
                f"Not confirmed: epsilon = {self.epsilon} is what privacy.json says; "
                "it was not computed."
            )
        return " ".join(sentences)

    def text(self) -> str:
        """Returns one line a check, the conclusion, and the seal with its use and its limits."""
        wide = max(len(check.name) for check in self.checks)
        lines = [
            f"{check.verdict:<11}  {check.name:<{wide}}  {check.detail}" for check in self.checks
        ]
        if self.seal is None:
            return "\n".join([*lines, "", self.conclusion()])
        return "\n".join([*lines, "", self.conclusion(), "", f"seal {self.seal}", _SEAL])

    def to_dict(self) -> dict[str, Any]:
        """Returns the certificate that can travel with a model, JSON-ready."""
        return {
            "fedmtl": __version__,
            "fits": self.fits,
            "conclusion": self.conclusion(),
            **asdict(self),
        }


def verify(folder: str | Path) -> Verification:
    """Checks the finished run in ``folder``, or a node's account of its shares in secure sums; the
    files are only read.

    Args:
        folder: of the run, or of the node. If it holds only ``public/``, checks that need the
            private part are not covered.

    Returns:
        The checks in their order, each confirmed, failed or not covered, with the epsilon and the
        seal of the run.

    Raises:
        DataError: not the folder of a run, a run that has not finished, or a report that cannot be
            read.

    Example:
        >>> from dataclasses import replace
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models
        >>> from fedmtl.audit import verify
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=4),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     _ = replace(trainer, folder=folder).fit()
        ...     verification = verify(folder)
        >>> verification.fits
        True
    """
    place = RunFolder(Path(folder))
    if ledger_header(place).get("account") == ACCOUNT:
        return _account(ShareLedger(place))
    try:
        run = FinishedRun(place)
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from error
    checks = _checked(run, _CHECKS)
    figures = {name: run.report.get(name) for name in ("epsilon", "delta")}
    known = {name: value for name, value in figures.items() if _is_number(value) or value == "inf"}
    identity = run.report.get("run")
    if not isinstance(identity, str):
        identity = None
    return Verification(
        run=None if identity is None else _line(identity),
        seal=run.seal,
        epsilon=known.get("epsilon"),
        delta=known.get("delta"),
        checks=checks,
    )


def _account(account: ShareLedger) -> Verification:
    """Checks a node's own account of its shares in secure sums."""
    checks = _checked(account, OF_SHARES)
    epsilon = None
    delta = None
    run = None
    if all(check.verdict == CONFIRMED for check in checks):
        epsilon = account.epsilon
        delta = account.cost.delta
        run = account.chain.digests[0]
    return Verification(run=run, seal=None, epsilon=epsilon, delta=delta, checks=checks)


def _checked(
    of: Folder, functions: Sequence[tuple[str, str, Callable[[Folder], Answer]]]
) -> tuple[Check, ...]:
    """Returns the lines of the checks that apply to a folder.

    Args:
        of: the folder's files.
        functions: name, files and function of each check.
    """
    checks: list[Check] = []
    for name, files, check in functions:
        try:
            answer = check(of)
        except NotCovered as reason:
            checks.append(Check(name, OPEN, _line(str(reason))))
        except Exception as error:  # whatever a file holds, it is the file that fails
            if isinstance(error, FedmtlError):
                # our own errors name the file; of others the type is the only clue
                text = str(error)
            else:
                text = f"{files} cannot be read: {error!r}"
            checks.append(Check(name, FAILED, _line(text)))
        else:
            if answer is not None:
                wrong, detail = answer
                text = "; ".join(wrong[:3])
                if len(wrong) > 3:
                    text += f"; and {len(wrong) - 3} more"
                verdict = FAILED if wrong else CONFIRMED
                checks.append(Check(name, verdict, _line(text or detail)))
    return tuple(checks)


def _line(text: str) -> str:
    """Returns a text as a part of one line, whatever it quotes of the files: without control
    characters, and cut off after some sentences."""
    if len(text) <= _LONGEST:
        return shown(text)
    return f"{shown(text[:_LONGEST])} ..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_LEDGER = "the ledger or the report"
_CHECKS: tuple[tuple[str, str, Callable[[FinishedRun], Answer]], ...] = (
    ("files: public", MANIFEST, partial(check_files, private=False)),
    ("files: private", MANIFEST, partial(check_files, private=True)),
    ("chain", "the ledger", check_chain),
    ("head", _LEDGER, check_head),
    ("checkpoint", "the checkpoint", check_checkpoint),
    ("settings", _LEDGER, check_settings),
    ("search", _LEDGER, check_search),
    ("fields", _LEDGER, check_fields),
    ("charges", _LEDGER, check_charges),
    ("epsilon", _LEDGER, check_epsilon),
    ("budget", "the report", check_budget),
    ("interval", _LEDGER, check_interval),
    ("row noise", "the ledger", check_row_noise),
    ("headline", "the report", check_headline),
    ("report", "the report", check_report),
    ("grid", "releases.safetensors or the ledger", check_grid),
    ("model", "model.safetensors or the checkpoint", check_model),
)
"""Name, files that it reads, and function of every check, in the order of the lines."""
