"""How many workers each pool has: signals in, a decision, processes added, drained and removed."""
