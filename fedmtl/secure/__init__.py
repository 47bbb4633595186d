"""Secure aggregation: a server adds up rows of clients that it cannot read (Bonawitz et al., CCS
2017). Bytes in, bytes out; the network is somebody else's.

The steps of a round, of which each fixes a smaller set of clients:

1. Every client sends two public keys, of its masks and of its boxes, and the digest of a seed of
   its own mask, signed with its identity key.
2. The server answers with the roster, the signed keys of all that came in time. A client divides
   the seed of its mask key and that of its own mask among the roster, and sends a box with its two
   shares for every other client.
3. The server delivers the boxes. A client is charged, and only then makes its row: the words that
   it contributes, and the masks.
4. The server names the clients whose rows came. A client sends its share of the own mask's seed of
   each, and of the mask key of every other one that had sent boxes.

The server takes the own masks of the rows that came out of their sum, and the masks that these rows
share with the clients that were lost. The sum of the rows that came is left, exactly.

A client answers each step once: the same question has the same answer, another one has none. It
never gives both kinds of shares of one client. Secrets of an attempt that are lost with the process
are lost to the attempt.

:mod:`.member` is a client and :mod:`.server` the server. :mod:`.parameters` has the public
parameters of an attempt, :mod:`.agreement` the keys, :mod:`.shamir` the secret sharing,
:mod:`.masks` the ciphers, :mod:`.wire` the messages, and :mod:`.roster` the number of honest rows
in a sum. The package knows nothing of privacy: noise and its account are those of
:mod:`fedmtl.privacy`.
"""
