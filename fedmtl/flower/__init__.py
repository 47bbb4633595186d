"""Clients in processes and on machines of their own, with Flower: ``pip install "fedmtl[flower]"``.

The settings are those of a :class:`~fedmtl.Trainer` whose data is a :func:`population`: names and
shapes, no records. :func:`server_app` makes a Flower ``ServerApp`` of it, which is ``Trainer.fit``
with the clients elsewhere. :func:`client_app` makes a ``ClientApp``, which keeps a client's model
in a folder of its node. docs/pages/deploy.md leads from nothing to three nodes and a certificate.
With ``schedule=Buffered(...)`` the server waits for no node.

Guarantees:

- The ledger has charged a round, on disk, before its first message.
- Cohorts are drawn from the whole population by the server's own coins, never from the nodes that
  happen to be connected: the operator does not choose these, and they amplify nothing.
- A drawn client that does not answer in time, with rows of the right shape and finite values, adds
  nothing to any sum over the same public denominator, as if it were not in the population.
- If whole clients are protected, every client clips before it sends, and the server clips again.
  The server adds the noise. It sees the clipped messages before: clients trust it with them, and
  the network with the names of the cohort.
- In secure sums (``ClientPrivacy(aggregation=...)``) every client adds a share of the noise and
  hides its row behind masks: the server sees the noised sum of a cohort, and the account is each
  node's own.
- If records are protected, or rows have noise against the server, the noise is the node's own. So
  is the account: a ledger on its disk, charged before it computes, whatever a server asks and
  however often, and whether it uses the answer or not.
- Nothing else leaves a node: scores and personal models stay in its folder, and a reply after an
  error is empty.
"""

from __future__ import annotations

from .._extras import extras

with extras():
    from .client import client_app
    from .population import population, with_target_range
    from .server import server_app

__all__ = ["client_app", "population", "server_app", "with_target_range"]
