"""Benchmarks start from their own folder."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "router.py"


def test_the_routers_benchmark_finds_the_routers_package_and_not_itself() -> None:
    """The script's folder came before an editable install, and `router` was the script."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--quick" in done.stdout, done.stderr
