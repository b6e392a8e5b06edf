"""`baton up --ray`: hands over to the package `baton_ray`, where it is installed."""

from contextlib import AbstractContextManager

from baton.cli.ground import Ground
from baton.cli.up_settings import UpSettings
from baton.cluster.errors import BatonError


def on_ray(settings: UpSettings) -> AbstractContextManager[Ground]:
    """A Ray cluster to stand on, for as long as the context lasts. Raises BatonError."""
    try:
        from baton_ray.session import ray_session
    except ModuleNotFoundError as error:
        raise BatonError(
            f"--ray needs Ray, and {error.name} is not here: pip install 'baton-serve[ray]'"
        ) from error
    return ray_session(settings)
