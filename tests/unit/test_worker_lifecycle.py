"""What a worker's process says when it ends."""

from baton.cluster.errors import SettingsError
from baton.engine.async_engine import EngineFailed
from baton.worker.lifecycle import StopSignals, run_worker


def test_the_exit_status_tells_an_orderly_stop_from_a_failed_engine_and_wrong_settings() -> None:
    """A failed engine's process lived on, and whoever supervises it had nothing to start again."""

    async def serve(end: Exception | None, signals: StopSignals) -> None:
        if end is not None:
            raise end

    ends = (None, EngineFailed("boom"), SettingsError("wrong"))
    assert [run_worker(lambda end=end: end, serve) for end in ends] == [0, 1, 2]
