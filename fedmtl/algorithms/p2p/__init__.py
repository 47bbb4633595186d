"""Peer-to-peer personalized learning (Bellet et al. 2018)."""
