"""What the processes of a cluster share: who lives where, how they talk, how they are set up.

Owns the network side (gRPC, Redis, settings, logs, metrics). Knows nothing of models: never
imports torch or the engine.
"""

import os

# gRPC reads this when it is imported; its INFO lines about a lost peer are not for people.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
