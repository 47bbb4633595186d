"""Clients and a server of a secure sum, in one process."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fedmtl.secure.masks import Identity
from fedmtl.secure.member import Member
from fedmtl.secure.parameters import PublicParameters
from fedmtl.secure.server import SecureSumServer

STEPS = ("keys", "shares", "row", "opening")


@dataclass
class Parties:
    """The clients of one attempt, their rows and the server."""

    public: PublicParameters
    identities: dict[str, Identity]
    members: dict[str, Member]
    rows: dict[str, np.ndarray]
    server: SecureSumServer

    def again(self, **changes: object) -> Parties:
        """Another attempt of the same clients."""
        return _parties(self.identities, {**vars_of(self.public), "attempt": 1, **changes})

    def row(self, name: str, boxes: bytes) -> bytes:
        return self.members[name].row(boxes, lambda roster: self.rows[name])

    def run(self, lost: Mapping[str, str] | None = None) -> np.ndarray:
        """The sum, if some clients are lost before they answer a step."""
        lost = lost or {}
        self.run_to("opening", lost)
        return self.server.total()

    def run_to(self, step: str, lost: Mapping[str, str]) -> None:
        """Runs the steps up to the answers of ``step``, which the server has then."""
        questions: Mapping[str, bytes] = dict.fromkeys(self.members, b"")
        for number, now in enumerate(STEPS):
            gone = {name for name, at in lost.items() if STEPS.index(at) <= number}
            for name, question in questions.items():
                if name not in gone:
                    self.server.take(name, self.answer(name, now, question))
            if now == step:
                return
            questions = self.questions(now, questions)

    def answer(self, name: str, step: str, question: bytes) -> bytes:
        member = self.members[name]
        if step == "keys":
            return member.keys
        if step == "row":
            return self.row(name, question)
        return getattr(member, step)(question)

    def questions(self, step: str, before: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """The server's messages after a step."""
        if step == "keys":
            return dict.fromkeys(before, self.server.roster())
        if step == "shares":
            return self.server.boxes()
        return dict.fromkeys(before, self.server.names())

    def plain(self, lost: Collection[str] = ()) -> list[int]:
        """The sum of rows without masks, by whole numbers of Python."""
        half = 1 << (self.public.bits - 1)
        columns = zip(
            *(row.tolist() for name, row in self.rows.items() if name not in lost), strict=True
        )
        return [(sum(column) + half) % (2 * half) - half for column in columns]


def vars_of(public: PublicParameters) -> dict[str, object]:
    return {
        name: getattr(public, name)
        for name in (
            "run",
            "round",
            "attempt",
            "settings",
            "length",
            "colluding",
            "missing",
            "bits",
        )
    }


def parties(clients: int = 5, colluding: int = 1, missing: int = 1, **options: object) -> Parties:
    """Clients with new identities and random rows."""
    identities = {f"c{i}": Identity(secrets.token_bytes(32)) for i in range(clients)}
    settings = {
        "run": "run",
        "round": 3,
        "attempt": 0,
        "settings": "settings",
        "length": 5,
        "bits": 32,
    }
    return _parties(identities, {**settings, "colluding": colluding, "missing": missing, **options})


def _parties(identities: dict[str, Identity], options: Mapping[str, object]) -> Parties:
    public = PublicParameters(
        identities={name: key.public for name, key in identities.items()}, **options
    )
    generator = np.random.default_rng(0)
    rows = {}
    for name in identities:
        rows[name] = generator.integers(
            0, 1 << public.bits, size=public.length, dtype=f"<u{public.bits // 8}"
        )
    members = {name: Member(public, name, key) for name, key in identities.items()}
    return Parties(public, identities, members, rows, SecureSumServer(public))
