"""Smaller forms of cached keys and values."""
