"""Benchmarks start from their own folder, and say at once what is wrong."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def bench(script: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCH / script), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_routers_benchmark_finds_the_routers_package_and_not_itself() -> None:
    """The script's folder came before an editable install, and `router` was the script."""
    done = bench("router.py", "--help")
    assert done.returncode == 0 and "--quick" in done.stdout, done.stderr


def test_a_model_that_is_not_there_is_said_before_anything_is_simulated(tmp_path: Path) -> None:
    done = bench("slo.py", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 1 and "nothing" in done.stderr and not done.stdout
    assert "Traceback" not in done.stderr


def test_the_floor_of_a_prediction_is_what_no_weights_can_explain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from _hindsight import least_mape

    rng = random.Random(1)
    costs = [[1.0, rng.uniform(10, 1000)] for _ in range(200)]
    exact = [(x, 0.01 + 1e-4 * x[1]) for x in costs]
    assert least_mape({0: exact}) < 1e-3
    halves = [(x, y * rng.choice([0.5, 1.0])) for x, y in exact]
    # Whatever is said, half of them are wrong: by as much as 0.5 of the larger value is.
    assert least_mape({0: halves}) == pytest.approx(0.25, abs=0.02)
