"""The errors that cross a module border in the network side, one class per reaction.

A message is one sentence for a person: what is wrong, and what to do where that is known.
`retry_after_s` is set where waiting helps. Nothing here knows gRPC or HTTP codes.
"""


class BatonError(Exception):
    """Base of every error that a user or a client may be shown."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SettingsError(BatonError):
    """A flag, environment variable or TOML value is wrong: say so and exit with code 2."""


class RegistryUnavailable(BatonError):
    """Redis did not answer in time: go on with what is known."""


class RegistryRefused(RegistryUnavailable):
    """Redis answers, but will not do it: it is read-only, or out of memory."""


class WorkerUnavailable(BatonError):
    """A worker died, hung or refused for reasons of its own: try another one."""


class Overloaded(BatonError):
    """No room right now: try another worker, or later."""


class RequestRejected(BatonError):
    """The request itself can never be served: tell the client, do not retry."""
