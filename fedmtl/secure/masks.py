"""Keys of the secure sum, and masks that are made of them.

A key is used for one stream only, so that a nonce of zero is never repeated: it is derived by
HKDF-SHA256 from a secret that is new in every attempt and from all that the two sides must agree
on. A mask is the stream of AES-256 in counter mode under its key, as whole numbers modulo 2**32 or
2**64.
"""

from __future__ import annotations

import numpy as np

from .._extras import extras

with extras():
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY = 32
"""Bytes of every key, private or public."""
SIGNATURE = 64
TAG = 16
"""Bytes that a box adds to its content."""

_NONCE = bytes(12)
_BLOCK = 1 << 18  # bytes of a stream that stay in the cache
_ZEROS = bytes(_BLOCK)


def derived(secret: bytes, *about: bytes) -> bytes:
    """Returns a key of 32 bytes derived from a secret and the purpose of the key (HKDF with
    SHA-256).

    Args:
        secret: unknown to all parties that must not know the key.
        about: the purpose first; parts of lengths that the purpose fixes.
    """
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=b"".join(about)).derive(secret)


class Identity:
    """The identity of a client: its key for signatures.

    Args:
        secret: 32 bytes, which stay on the client's node.

    Attributes:
        public: the 32 bytes that all have in their settings.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    def signed(self, text: bytes) -> bytes:
        """Returns the signature of a text, 64 bytes."""
        return self._key.sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Returns True if a signature of a text was made with the private key of ``public``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


class Pair:
    """A pair of keys by which two clients agree on a secret.

    Args:
        seed: secret bytes, of which the private key is made.

    Attributes:
        public: the other key, 32 bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(derived(seed, b"fedmtl pair"))
        self.public = self._key.public_key().public_bytes_raw()

    def agreed(self, public: bytes) -> bytes | None:
        """Returns the secret that this pair and the owner of ``public`` have in common, 32 bytes;
        None of a key with which nothing is secret."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            return None


def sealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """Returns a box: a content that only owners of the key can read or alter.

    Args:
        key: 32 bytes, of this box alone.
        content: any bytes.
        about: public bytes that the box is bound to.
    """
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, about)


def unsealed(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """Returns the content of a box; None if it was not made with this key and ``about``."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, box, about)
    except InvalidTag:
        return None


class Words:
    """A vector of whole numbers modulo 2**bits, to which masks are added.

    Args:
        length: D.
        bits: 32 or 64.
    """

    def __init__(self, length: int, bits: int) -> None:
        self._words = np.zeros(length, dtype=f"<u{bits // 8}")
        self._stream = memoryview(bytearray(_BLOCK + TAG))

    def add(self, words: np.ndarray) -> None:
        """Adds words (D,) of the same dtype."""
        self._words += words

    def add_mask(self, key: bytes) -> None:
        """Adds the mask of a key."""
        self._mask(key, np.add)

    def subtract_mask(self, key: bytes) -> None:
        """Subtracts the mask of a key."""
        self._mask(key, np.subtract)

    def _mask(self, key: bytes, change: np.ufunc) -> None:
        # A counter from zero: the key has no other stream.
        cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        size = self._words.itemsize
        # A block at a time: a stream as long as the row would leave the cache twice.
        block = _BLOCK // size
        for first in range(0, len(self._words), block):
            part = self._words[first : first + block]
            written = cipher.update_into(memoryview(_ZEROS)[: size * len(part)], self._stream)
            mask = np.frombuffer(self._stream[:written], dtype=self._words.dtype)
            change(part, mask, out=part)

    def to_bytes(self) -> bytes:
        """Returns the words as bytes, little-endian."""
        return self._words.tobytes()

    def signed(self) -> np.ndarray:
        """Returns the words as whole numbers from -2**(bits - 1) on: int64 (D,)."""
        return self._words.view(f"<i{self._words.itemsize}").astype(np.int64)
