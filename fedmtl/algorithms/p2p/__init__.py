"""Peer-to-peer personalized learning (Bellet et al. 2018)."""

from .algorithm import PeerToPeer
from .published import PublishedPeerToPeer

__all__ = ["PeerToPeer", "PublishedPeerToPeer"]
