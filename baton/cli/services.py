"""`baton router|prefill|decode`: one process of a cluster, from flags to its `main`'s exit code.

Each is the same as `python -m router|prefill_service|decode_service`.
"""

from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings


def run_router(argv: list[str]) -> int:
    settings = RouterSettings.load(argv, "baton router")
    from router.__main__ import main

    return main(settings)


def run_prefill(argv: list[str]) -> int:
    settings = PrefillSettings.load(argv, "baton prefill")
    from prefill_service.__main__ import main

    return main(settings)


def run_decode(argv: list[str]) -> int:
    settings = DecodeSettings.load(argv, "baton decode")
    from decode_service.__main__ import main

    return main(settings)
