"""What the split costs: time to first token through the cluster, minus the bare prefill.

Starts `baton up` (one prefill and one decode worker, model store warm), sends prompts that no
cache knows, and times the first streamed token. The bare prefill is the same prompts in an
engine of this process, on the prefill worker's cores with as many threads, in turn with the
requests.

    python bench/handoff.py [--quick] [--json FILE] [--model NAME|PATH]
"""

import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil
import torch
from _common import Report, parser, timed

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.store import resolve

PROMPT_TOKENS = (128, 512, 2048)
START_DEADLINE_S = 120.0
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Cluster:
    client: httpx.Client
    first_answer_s: float
    prefill_cores: list[int]


@contextmanager
def cluster(model: str) -> Iterator[Cluster]:
    """A running `baton up`; `first_answer_s` counts from its start to its first answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "baton", "up", "--port", str(port), "--model", model]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_ready(client, process)
            client.post("/v1/completions", json=body([1, 2, 3], max_tokens=2)).raise_for_status()
            seconds = time.perf_counter() - started
            yield Cluster(client, seconds, _prefill_cores(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _wait_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit("baton up ended early; run it by hand to see why")
        try:
            if client.get("/health/ready").is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.02)
    raise SystemExit(f"baton up was not ready within {START_DEADLINE_S} s")


def _prefill_cores(pid: int) -> list[int]:
    for child in psutil.Process(pid).children(recursive=True):
        if "prefill_service" in child.cmdline():
            return child.cpu_affinity() or []
    raise SystemExit("no prefill worker found among the children of baton up")


def body(prompt: list[int], max_tokens: int) -> dict[str, object]:
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def arrivals(client: httpx.Client, prompt: list[int]) -> list[float]:
    """Seconds from sending to each of two tokens."""
    times, start = [], time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body(prompt, 2)) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter() - start)
    return times


def measure(report: Report, running: Cluster, llm: LLM, size: int, rounds: int) -> None:
    rng = random.Random(size)
    firsts, seconds, bares = [], [], []
    for _ in range(rounds + 1):
        prompt = rng.choices(range(3, 40_000), k=size)
        first, *rest = arrivals(running.client, prompt)
        firsts.append(first)
        seconds.append(rest[0] - first if rest else 0.0)
        bares.append(timed(lambda prompt=prompt: llm.generate([prompt], FIRST)))  # type: ignore[misc]
    median = statistics.median
    ttft, bare = median(firsts[1:]), median(bares[1:])
    name = f"handoff.{size}"
    report.add(f"{name}.ttft_ms", ttft * 1e3, "ms")
    report.add(f"{name}.bare_prefill_ms", bare * 1e3, "ms")
    report.add(f"{name}.first_to_second_ms", median(seconds[1:]) * 1e3, "ms")
    added = (ttft - bare) * 1e3
    report.add("handoff.added_ttft_ms" if size == 128 else f"{name}.added_ttft_ms", added, "ms")


def main() -> None:
    arguments = parser("What the split adds to the time to first token.")
    arguments.add_argument("--model", default="smollm2", help="name in the store, or a path")
    args = arguments.parse_args()
    stored = resolve(args.model)
    report = Report("Hand-off: cluster against bare prefill")
    with cluster(args.model) as running:
        psutil.Process().cpu_affinity(running.prefill_cores)
        torch.set_num_threads(len(running.prefill_cores))
        llm = LLM(stored.path, enable_prefix_cache=False)
        for size in PROMPT_TOKENS[: 1 if args.quick else None]:
            measure(report, running, llm, size, rounds=5 if args.quick else 15)
        report.add("handoff.first_answer_s", running.first_answer_s, "s")
    report.finish(args.json)


if __name__ == "__main__":
    main()
