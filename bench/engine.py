"""Speed of one engine without the cluster: prefill rate and decode time per token.

Every number stands beside the ceiling that bounds it on this machine, measured in the same run
(the matrix product rate for prefill, the memory read rate for decode), and beside the same work
done by transformers and, where there is one, vLLM.

    python bench/engine.py [--quick] [--json FILE] [--model NAME|PATH] [--threads N]
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from _common import Report, alternate, parser, timed
from _contenders import Contender, contenders

from baton.engine.kv_layout import KVLayout
from baton.engine.model_config import ModelConfig
from baton.store import resolve

PROMPTS = (128, 512, 2048)
BATCHES = (1, 4, 16, 64)
DECODE_PROMPT = 128
NEW_TOKENS = 33


@dataclass(frozen=True)
class Ceilings:
    flop_s: float
    read_byte_s: float


def measure_ceilings(rounds: int = 10) -> Ceilings:
    """The best bf16 product of two 2048 × 2048 matrices, and the best sum over 512 MB."""
    size = 2048
    a, b = (torch.randn(size, size).bfloat16() for _ in range(2))
    memory = torch.ones(128 << 20)
    gemm = min(timed(lambda: torch.mm(a, b)) for _ in range(rounds))
    read = min(timed(memory.sum) for _ in range(rounds))
    return Ceilings(2 * size**3 / gemm, memory.nbytes / read)


def prefill_flop(config: ModelConfig, num_tokens: int) -> float:
    """Products with the layers' weights, and causal attention; the head is one row."""
    head = config.vocab_size * config.hidden_size
    embeddings = head if config.tie_word_embeddings else 2 * head
    weights = 2 * (config.num_parameters - embeddings) * num_tokens + 2 * head
    return weights + 2 * config.num_layers * config.q_size * num_tokens * (num_tokens + 1)


def decode_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """What a step must read: the weights once, and the KV of every sequence. Not the embedding
    table, unless it is also the head."""
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    kv = KVLayout.of(config, 16).bytes_per_token * batch * context
    return 2 * (config.num_parameters - table) + kv


def tokens(count: int, vocab: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


def bench_prefill(
    report: Report,
    rivals: dict[str, Contender],
    config: ModelConfig,
    ceilings: Ceilings,
    rounds: int,
) -> None:
    for length in PROMPTS:
        prompt = tokens(length, config.vocab_size, seed=length)
        runs = {name: (lambda r=rival, p=prompt: r.prefill(p)) for name, rival in rivals.items()}
        seconds = alternate(runs, rounds)
        ours = seconds["baton"]
        rate = prefill_flop(config, length) / ours
        report.add(f"prefill.{length}.tok_s", length / ours, "tok/s")
        report.add(f"prefill.{length}.gflop_s", rate / 1e9, "GFLOP/s")
        report.add(f"prefill.{length}.gemm_share", rate / ceilings.flop_s, "share")
        add_ratios(report, f"prefill.{length}", seconds)


def bench_decode(
    report: Report,
    rivals: dict[str, Contender],
    config: ModelConfig,
    ceilings: Ceilings,
    rounds: int,
) -> None:
    for batch in BATCHES:
        prompts = [tokens(DECODE_PROMPT, config.vocab_size, seed=i) for i in range(batch)]
        seconds = decode_seconds(rivals, prompts, rounds)
        ours = seconds["baton"]
        rate = decode_bytes(config, batch, DECODE_PROMPT + NEW_TOKENS // 2) / ours
        name = f"decode.b{batch}"
        report.add(f"{name}.tpot_ms", ours * 1e3, "ms")
        report.add(f"{name}.tok_s", batch / ours, "tok/s")
        report.add(f"{name}.gb_s", rate / 1e9, "GB/s")
        report.add(f"{name}.bandwidth_share", rate / ceilings.read_byte_s, "share")
        add_ratios(report, name, seconds)


def decode_seconds(
    rivals: dict[str, Contender], prompts: list[list[int]], rounds: int
) -> dict[str, float]:
    """Seconds of one decode step: a long answer less an answer of one token."""
    runs = {}
    for name, rival in rivals.items():
        runs[f"{name} long"] = lambda r=rival: r.generate(prompts, NEW_TOKENS)
        runs[f"{name} short"] = lambda r=rival: r.generate(prompts, 1)
    seconds = alternate(runs, rounds)
    steps = NEW_TOKENS - 1
    return {n: (seconds[f"{n} long"] - seconds[f"{n} short"]) / steps for n in rivals}


def add_ratios(report: Report, name: str, seconds: dict[str, float]) -> None:
    for rival in seconds.keys() - {"baton"}:
        report.add_ratio(f"{name}.vs_{rival}", seconds["baton"], seconds[rival])


def main() -> None:
    arguments = parser("Prefill rate and decode time of one engine.")
    arguments.add_argument("--model", default="smollm2", help="name in the model store, or path")
    arguments.add_argument("--threads", type=int, help="torch threads; default: what torch takes")
    arguments.add_argument("--vllm-url", help="a running vLLM server to compare with")
    options = arguments.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="transformers")
    path = Path(resolve(options.model).path)
    config = ModelConfig.from_dir(path)
    ceilings = measure_ceilings()
    report = Report(f"engine, {options.model}, bfloat16, {torch.get_num_threads()} threads")
    report.add("machine.gemm_gflop_s", ceilings.flop_s / 1e9, "GFLOP/s")
    report.add("machine.read_gb_s", ceilings.read_byte_s / 1e9, "GB/s")
    rivals = contenders(path, max(BATCHES), options.vllm_url)
    rounds = 3 if options.quick else 7
    bench_prefill(report, rivals, config, ceilings, rounds)
    bench_decode(report, rivals, config, ceilings, 1 if options.quick else 3)
    report.finish(options.json)


if __name__ == "__main__":
    main()
