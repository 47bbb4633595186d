"""Peer-to-peer personalized learning (Bellet et al. 2018)."""

from .algorithm import PeerToPeer

__all__ = ["PeerToPeer"]
