"""What prefill and decode workers have in common: start-up, translation, status, lifecycle.

The only part of the shared library that sees both the engine and the cluster.
"""
