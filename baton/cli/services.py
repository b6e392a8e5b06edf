"""`baton router|prefill|decode`: one process of a cluster, from flags to its `main`'s exit code.

A router is the same as `python -m router`. Workers are those of `python -m prefill_service` and
`decode_service`, and can change their role besides.
"""

from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings


def run_router(argv: list[str]) -> int:
    settings = RouterSettings.load(argv, "baton router")
    from router.__main__ import main

    return main(settings)


def run_prefill(argv: list[str]) -> int:
    settings = PrefillSettings.load(argv, "baton prefill")
    from baton.cli.worker_process import run

    return run(settings)


def run_decode(argv: list[str]) -> int:
    settings = DecodeSettings.load(argv, "baton decode")
    from baton.cli.worker_process import run

    return run(settings)
