"""Mutual TLS between the processes of a cluster.

folder     the three files of a process, read again when they change
authority  a private authority that issues them
keeper     keeps those of a whole cluster fresh
peers      which role may call what, and the log of who was refused

A certificate names one role in a SPIFFE id, `spiffe://baton/ROLE`, beside the hosts it is for.
"""

from baton.cluster.tls.folder import TlsFolder
from baton.cluster.tls.peers import PeerGuard

__all__ = ["PeerGuard", "TlsFolder"]
