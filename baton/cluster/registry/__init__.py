"""Who lives: workers announce themselves in Redis, routers keep a live directory of them.

Redis may vanish at any moment: announcing and reading go on trying in the background, and the
last known workers stay known.
"""

from baton.cluster.registry.announcer import Announcer
from baton.cluster.registry.directory import Directory, RegistryState
from baton.cluster.registry.store import Listing, Registry

__all__ = ["Announcer", "Directory", "Listing", "Registry", "RegistryState"]
