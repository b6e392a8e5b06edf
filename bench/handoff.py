"""What the split costs: time to first token through the cluster, minus the bare prefill.

Starts `baton up` (one prefill and one decode worker, model store warm), sends prompts that no
cache knows, and times the first streamed token. The bare prefill is the same prompts in an
engine of this process, on the prefill worker's cores with as many threads, in turn with the
requests.

    python bench/handoff.py [--quick] [--json FILE] [--model NAME|PATH]
"""

import json
import random
import statistics
import time

import httpx
import psutil
import torch
from _cluster import Cluster, running_cluster
from _common import Report, parser, timed

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.store import resolve

PROMPT_TOKENS = (128, 512, 2048)
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


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
    with running_cluster(args.model) as running:
        cores = running.prefill_cores()
        psutil.Process().cpu_affinity(cores)
        torch.set_num_threads(len(cores))
        llm = LLM(stored.path, enable_prefix_cache=False)
        for size in PROMPT_TOKENS[: 1 if args.quick else None]:
            measure(report, running, llm, size, rounds=5 if args.quick else 15)
        report.add("handoff.first_answer_s", running.first_answer_s, "s")
    report.finish(args.json)


if __name__ == "__main__":
    main()
