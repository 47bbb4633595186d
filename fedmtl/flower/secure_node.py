"""The node's part in secure sums: its keys, its shares of those of others, its masked row, and its
answer to which rows came.

A round has four messages. Training comes first, so that a slow node misses the roster and not the
sum. A node computes each answer in a process of its own, perhaps. The facts that it needs at the
next message are secret, and in the memory that Flower's SuperNode keeps for it, never on a disk; a
node that restarts is lost to this round. The row waits on the node's own disk, beside its records.

That memory may be older than the node's last answer: SuperNode keeps it after the reply, and two
messages at once find the same one. So the disk names, without any secret, the keys of the attempt
and the answers that were given with them. From an older memory there is no second answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from .._files import read_json, write_json
from ..algorithms.base import Problem
from ..errors import ConfigError, ResumeError
from ..privacy import ClientPrivacy, GradientPlan, RecordPrivacy, ReleasePlan, RoundChannel
from ..privacy.secure_calibration import (
    SecureCalibration,
    calibrate_secure_gradients,
    calibrate_secure_sum,
)
from ..privacy.secure_sum import LocalRandomizer, ShareAccount
from ..secure.masks import Identity
from ..secure.member import Member
from ..secure.parameters import PublicParameters
from ..secure.wire import Kind, digest
from ..trainer import Trainer
from ..trainer.folder import RunFolder
from ..trainer.run_channel import releases_of
from .account import schedule_of
from .messages import OWN_AFFAIR, Facts, logger

MEMORY = "secure sum"
_RUN = "attempt of"
# a number of the client's keys, which are new whenever it is asked for some; no secret
_BEGUN = "begun"


def secure_calibration_of(trainer: Trainer, problem: Problem) -> SecureCalibration:
    """Calibrates the secure sums of a run, with the same result at the server and at every node.

    Args:
        trainer: the settings.
        problem: of the population.
    """
    schedule = schedule_of(trainer)
    plans = releases_of(trainer.algorithm, problem, schedule)
    rows = tuple(plan for plan in plans if isinstance(plan, ReleasePlan))
    privacy = trainer.privacy
    if isinstance(privacy, RecordPrivacy):
        gradients = next(plan for plan in plans if isinstance(plan, GradientPlan))
        return calibrate_secure_gradients(privacy, rows, gradients, schedule, problem.rounds)
    assert isinstance(privacy, ClientPrivacy)  # a run without privacy has no secure sums
    return calibrate_secure_sum(privacy, rows, schedule, problem.rounds)


def public_parameters(
    secure: SecureCalibration, identities: Mapping[str, bytes], fingerprint: str, facts: Facts
) -> PublicParameters:
    """Returns the public parameters of one attempt to open the sum of a round.

    Args:
        secure: of the run.
        identities: public keys of all clients, in the order of the population.
        fingerprint: of the settings of this side, of which both sides must have the same.
        facts: of a message: its run, round and attempt.
    """
    common = [part for part in fingerprint.split("; ") if part.split("=")[0] not in OWN_AFFAIR]
    noise = secure.noise
    return PublicParameters(
        identities=identities,
        run=str(facts["run"]),
        round=int(facts["round"]),
        attempt=int(facts["attempt"]),
        settings="; ".join([*common, secure.digest]),
        length=secure.release.size,
        colluding=noise.colluding,
        missing=noise.missing,
        bits=noise.bits,  # type: ignore[arg-type]
    )


class SecureNode:
    """One client's part in the secure sums of all runs, with its account on its own disk.

    Args:
        trainer: the settings.
        problem: of the population.
        channel: of the node, for its source of noise.
        fingerprint: of the settings.
        name: of the client.
        folder: of the node.
        identities: public keys of all clients.
        identity: the client's own.

    Raises:
        ConfigError: the client's own key is another one in ``identities``.
    """

    def __init__(
        self,
        trainer: Trainer,
        problem: Problem,
        channel: RoundChannel,
        fingerprint: str,
        name: str,
        folder: RunFolder,
        identities: Mapping[str, bytes],
        identity: Identity,
    ) -> None:
        if identities[name] != identity.public:
            raise ConfigError(
                f"the key of this node is not that of client {name!r} in identities=; one of the "
                "two belongs to another client."
            )
        self.secure = secure_calibration_of(trainer, problem)
        self._identities = identities
        self._identity = identity
        self._fingerprint = fingerprint
        self._name = name
        self._place = trainer.data.ids.index(name)
        self._share = LocalRandomizer(self.secure.release, channel.source)
        self._account = ShareAccount(
            folder.ledger, self.secure, name, self._place, fingerprint, channel.source
        )

    @property
    def release(self) -> str:
        """Returns the name of the release whose rows are added up."""
        return self.secure.release.name

    def keys(self, facts: Facts, memory: RecordDict, path: Path) -> bytes:
        """Begins the client's part in an attempt, and returns its keys.

        Args:
            facts: of the message.
            memory: of the SuperNode.
            path: of the file of the answers that were given in the attempt.
        """
        member = Member(self._public(facts), self._name, self._identity)
        begun = secrets.token_hex(16)
        # ends an attempt before it, also for processes that still have its memory
        write_json(path, {_BEGUN: begun})
        memory[MEMORY] = ConfigRecord({_RUN: _attempt(facts), _BEGUN: begun})
        self._keep(member, memory)
        return member.keys

    def shares(self, facts: Facts, memory: RecordDict, path: Path) -> bytes:
        """Answers the roster with boxes for all other clients; arguments as of :meth:`keys`."""
        member = self._member(facts, memory)
        answer = member.shares(_message(facts))
        self._once(Kind.SHARES, answer, memory, path)
        self._keep(member, memory)
        return answer

    def row(self, facts: Facts, memory: RecordDict, path: Path, row: torch.Tensor) -> bytes:
        """Answers the boxes with the masked row, which is charged before it has its noise.

        Args:
            facts: of the message.
            memory: of the SuperNode.
            path: of the file of the answers that were given in the attempt.
            row: (1, D) of the client.
        """
        member = self._member(facts, memory)

        def contribute(roster: int) -> np.ndarray:
            # before the charge, and no two rows are alike, so not again for the same boxes
            self._once(Kind.ROW, secrets.token_bytes(16), memory, path)
            with self._account.charged(int(facts["round"]), roster) as receipt:
                return self._share(row, torch.tensor([self._place]), receipt, roster)

        try:
            return member.row(_message(facts), contribute)
        finally:
            # also after a charge that failed, so that there is no second row
            self._keep(member, memory)

    def opening(self, facts: Facts, memory: RecordDict, path: Path) -> bytes:
        """Answers the names of the rows that came; arguments as of :meth:`keys`."""
        member = self._member(facts, memory)
        answer = member.opening(_message(facts))
        # a second list of names could have the other kind of shares of a client
        self._once(Kind.OPENING, answer, memory, path)
        self._keep(member, memory)
        return answer

    def certify(self) -> None:
        """Logs the privacy cost so far."""
        logger.info("%s: %s", self._name, self.secure.text(self._account.used))

    def _public(self, facts: Facts) -> PublicParameters:
        return public_parameters(self.secure, self._identities, self._fingerprint, facts)

    def _member(self, facts: Facts, memory: RecordDict) -> Member:
        """Returns the client as it was after its last answer in this attempt."""
        kept: Mapping[str, Any] = memory.config_records.get(MEMORY, {})
        if kept.get(_RUN) != _attempt(facts):
            raise ResumeError(
                f"the server asks for attempt {int(facts['attempt'])} of round "
                f"{int(facts['round']) + 1}, of which this node knows nothing (any more): it was "
                "started again, or has begun another attempt."
            )
        saved = {name: value for name, value in kept.items() if name not in (_RUN, _BEGUN)}
        return Member.restored(self._public(facts), self._name, self._identity, saved)

    def _keep(self, member: Member, memory: RecordDict) -> None:
        """Keeps the client for its next message."""
        kept = memory.config_records[MEMORY]
        about = {name: kept[name] for name in (_RUN, _BEGUN)}
        memory[MEMORY] = ConfigRecord({**about, **member.saved()})

    def _once(self, kind: Kind, answer: bytes, memory: RecordDict, path: Path) -> None:
        """Writes down an answer before it is given; refuses one from an older memory unless it is
        the same again."""
        marks: dict[str, Any] = {}
        if path.exists():
            marks = read_json(path)
        if marks.get(_BEGUN) != memory.config_records[MEMORY][_BEGUN]:
            raise ResumeError(
                f"this node has begun another attempt since, or its folder is another one ({path})."
            )
        mark = digest(answer).hex()
        if marks.setdefault(kind.name, mark) != mark:
            raise ResumeError(
                f"this node has given its answer ({kind.name.lower()}) in this attempt already, in "
                f"another process ({path})."
            )
        write_json(path, marks)


def _attempt(facts: Facts) -> str:
    """Returns the name of an attempt."""
    run = str(facts["run"])
    return f"{run} {int(facts['round'])} {int(facts['attempt'])}"


def _message(facts: Facts) -> bytes:
    """Returns the bytes of the protocol in a message; none if it has none, which are refused."""
    message = facts.get("message", b"")
    if isinstance(message, bytes):
        return message
    return b""
