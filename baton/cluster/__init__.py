"""What the processes of a cluster share: who lives where, how they talk, how they are set up.

Owns the network side (gRPC, Redis, settings, logs, metrics). Knows nothing of models: never
imports torch or the engine.
"""
