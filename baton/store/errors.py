"""The one error of the model store."""


class StoreError(Exception):
    """A sentence for a person: what is wrong with a model, and what to do about it."""
