"""Tokens per second with speculative decoding over without, on text that repeats and on text
that does not.

One engine on both sides, its drafts switched on and off in turn; the tokens must be the same.
`repeat`: the model is asked to copy passages of its prompt, and does. `plain`: sampled prose at
temperature 1, whose tokens are seldom foretold by earlier ones.

    python bench/speculation.py [--quick] [--json FILE] [--model NAME|PATH] [--threads N]
"""

from pathlib import Path
from typing import Any

import torch
from _common import Report, alternate, parser
from tokenizers import Tokenizer

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.store import resolve

PASSAGE = (
    "def area(width, height):\n    return width * height\n\n"
    "def volume(width, height, depth):\n    return area(width, height) * depth\n\n"
    "def describe(name, width, height, depth):\n"
    "    size = volume(width, height, depth)\n"
    '    return f"{name} holds {size} litres"\n'
)
REPEAT = (
    "<|im_start|>user\nRepeat this text exactly, and nothing else:\n\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PLAIN = (
    "The lighthouse keeper woke before dawn and",
    "In the early history of astronomy, people",
    "My grandmother used to say that a good soup",
    "When the train finally stopped in the desert,",
)


class Rivals:
    """The same engine with and without drafts."""

    def __init__(self, path: Path, speculate: str) -> None:
        self.llm = LLM(path, speculate=speculate, num_blocks=1024)
        self._drafting = self.llm.engine.scheduler.drafting
        self.texts: dict[str, Any] = {}

    def run(self, name: str, prompts: list[list[int]], sampling: SamplingParams) -> None:
        scheduler = self.llm.engine.scheduler
        scheduler.drafting = self._drafting if name == "drafts" else None
        choices = self.llm.generate(prompts, sampling)
        self.texts[name] = [[c.token_ids for c in group] for group in choices]

    @property
    def counts(self) -> tuple[int, int]:
        assert self._drafting is not None
        return self._drafting.tokens_drafted, self._drafting.tokens_accepted


def measure(
    report: Report,
    rivals: Rivals,
    name: str,
    prompts: list[list[int]],
    sampling: SamplingParams,
    rounds: int,
) -> None:
    runs = {kind: (lambda k=kind: rivals.run(k, prompts, sampling)) for kind in ("drafts", "none")}
    before = rivals.counts
    seconds = alternate(runs, rounds)
    drafted, accepted = (b - a for a, b in zip(before, rivals.counts, strict=True))
    if rivals.texts["drafts"] != rivals.texts["none"]:
        raise SystemExit(f"{name}: the drafts have changed the tokens")
    count = sum(len(text) for group in rivals.texts["none"] for text in group)
    report.add(f"{name}.none.tok_s", count / seconds["none"], "tok/s")
    report.add(f"{name}.tok_s", count / seconds["drafts"], "tok/s")
    report.add(f"{name}.accepted", accepted / max(drafted, 1), "share")
    report.add_ratio(f"{name}.ratio", seconds["drafts"], seconds["none"])


def main() -> None:
    arguments = parser("What speculative decoding gains and costs.")
    arguments.add_argument("--model", default="smollm2", help="name in the model store, or path")
    arguments.add_argument("--threads", type=int, help="torch threads; default: what torch takes")
    arguments.add_argument("--speculate", default="ngram", help="as for a decode worker")
    options = arguments.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    path = Path(resolve(options.model).path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    rivals = Rivals(path, options.speculate)
    kind = options.speculate.partition("(")[0]
    report = Report(f"speculation, {options.model}, {torch.get_num_threads()} threads")
    rounds, plain_rounds = (1, 1) if options.quick else (3, 9)  # a ratio near 1 needs more
    repeat = [encode(REPEAT.format(PASSAGE))]
    greedy = SamplingParams(temperature=0, max_tokens=128)
    measure(report, rivals, f"spec.{kind}.repeat", repeat, greedy, rounds)
    plain = [encode(text) for text in PLAIN]
    prose = SamplingParams(temperature=1.0, seed=1, max_tokens=128, ignore_eos=True)
    measure(report, rivals, f"spec.{kind}.plain", plain[:1], prose, plain_rounds)
    measure(report, rivals, f"spec.{kind}.plain_b4", plain, prose, plain_rounds)
    measure(report, rivals, f"spec.{kind}.repeat_b4", repeat * 4, greedy, rounds)
    report.finish(options.json)


if __name__ == "__main__":
    main()
