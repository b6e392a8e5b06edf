"""What a client sees when the decode worker of its stream is stopped or killed.

Two decode workers in float32; a seeded stream of two choices is read undisturbed, then again
with the busy worker stopped (SIGSTOP) and killed (SIGKILL) in the middle. Reports the longest
gap between two chunks and whether the text is the undisturbed one.

    python bench/failover.py [--quick] [--json FILE] [--model NAME|PATH]
"""

import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from _cluster import Cluster, running_cluster
from _common import Report, parser

NUM_TOKENS = 80
BREAK_AFTER = 30
QUESTION = [{"role": "user", "content": "Tell me a long story about a fox."}]
BODY = {
    "messages": QUESTION,
    "max_tokens": NUM_TOKENS,
    "temperature": 0.8,
    "seed": 5,
    "n": 2,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Reading:
    texts: dict[int, str] = field(default_factory=dict)
    gap_s: float = 0.0
    """Longest wait for a chunk after the first."""


def read(cluster: Cluster, disturb: Callable[[], None] | None = None) -> Reading:
    """One stream; `disturb` is called after some chunks."""
    reading, chunks, last = Reading(), 0, 0.0
    with cluster.client.stream("POST", "/v1/chat/completions", json=BODY) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                reading.texts[choice["index"]] = reading.texts.get(choice["index"], "") + text
            chunks += 1
            reading.gap_s = max(reading.gap_s, now - last if last else 0.0)
            last = now
            if chunks == BREAK_AFTER and disturb:
                disturb()
    return reading


def hit(cluster: Cluster, number: signal.Signals, victims: list[int]) -> None:
    """Signals the decode worker that computes."""
    workers = cluster.workers("decode")
    for worker in workers:
        worker.cpu_percent()
    time.sleep(0.1)
    busy = max(workers, key=lambda worker: worker.cpu_percent())
    victims.append(busy.pid)
    os.kill(busy.pid, number)


def recover(cluster: Cluster, number: signal.Signals, victim: int) -> None:
    """Back to two decode workers that answer."""
    if number is signal.SIGSTOP:
        os.kill(victim, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = cluster.client.get("/workers").json()["workers"]
        if sum(record["role"] == "decode" for record in records) == 2:
            return
        time.sleep(0.1)
    raise SystemExit("the cluster did not come back to two decode workers")


def main() -> None:
    arguments = parser("What a client sees when a decode worker is lost.")
    arguments.add_argument("--model", default="smollm2", help="name in the store, or a path")
    args = arguments.parse_args()
    report = Report("A decode worker is lost in mid-stream")
    with running_cluster(args.model, "--decode", "2", "--dtype", "float32") as cluster:
        recover(cluster, signal.SIGKILL, 0)
        calm = read(cluster)
        report.add("failover.none.gap_s", calm.gap_s, "s")
        for name, number in (("sigstop", signal.SIGSTOP), ("sigkill", signal.SIGKILL)):
            gaps, same = [], 0
            rounds = 1 if args.quick else 5
            for _ in range(rounds):
                victims: list[int] = []
                reading = read(cluster, lambda n=number, v=victims: hit(cluster, n, v))  # type: ignore[misc]
                recover(cluster, number, victims[0])
                gaps.append(reading.gap_s)
                same += reading.texts == calm.texts
            report.add(f"failover.{name}.gap_s", statistics.median(gaps), "s")
            report.add(f"failover.{name}.same_text_share", same / rounds, "")
    report.finish(args.json)


if __name__ == "__main__":
    main()
