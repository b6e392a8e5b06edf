"""Engines behind one interface, so that each is timed by the same formula.

`prefill` computes a prompt up to its first token; `generate` continues every prompt by exactly
so many tokens, greedily, whatever the model would rather end.
"""

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams

Prompts = Sequence[list[int]]


class Contender(Protocol):
    def prefill(self, prompt: list[int]) -> None: ...

    def generate(self, prompts: Prompts, num_tokens: int) -> None: ...


class Baton:
    """Scheduler, model and sampler of one process; no prefix cache, so nothing is remembered."""

    def __init__(self, path: Path, max_batch: int) -> None:
        self._llm = LLM(
            path,
            num_blocks=max(16 * max_batch, 160),
            max_num_seqs=max_batch,
            enable_prefix_cache=False,
        )

    def prefill(self, prompt: list[int]) -> None:
        self.generate([prompt], 1)

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        choices = self._llm.generate(prompts, sampling)
        if any(len(choice.tokens) != num_tokens for group in choices for choice in group):
            raise RuntimeError("a sequence ended early")


class Transformers:
    """The plain forward pass for a prompt, `generate` for the rest."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> None:
        self._model(torch.tensor([prompt]), logits_to_keep=1)

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        ids = torch.tensor(list(prompts))
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )


class Vllm:
    """vLLM in this process."""

    def __init__(self, path: Path, max_batch: int) -> None:
        import vllm

        self._params: Any = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            str(path), dtype="bfloat16", max_num_seqs=max_batch, enable_prefix_caching=False
        )

    def prefill(self, prompt: list[int]) -> None:
        self.generate([prompt], 1)

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        self._llm.generate(inputs, params, use_tqdm=False)


class CompletionsUrl:
    """A running OpenAI-compatible server that takes token ids and `ignore_eos`. Start it without
    prefix caching: prompts are sent again and again."""

    def __init__(self, url: str, max_batch: int) -> None:
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=600)
        self._pool = ThreadPoolExecutor(max_batch)
        listed = self._client.get("/v1/models").raise_for_status().json()
        self._model = listed["data"][0]["id"]

    def prefill(self, prompt: list[int]) -> None:
        self._complete(prompt, 1)

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        list(self._pool.map(lambda prompt: self._complete(prompt, num_tokens), prompts))

    def _complete(self, prompt: list[int], num_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._client.post("/v1/completions", json=body).raise_for_status()


def contenders(path: Path, max_batch: int, vllm_url: str | None) -> dict[str, Contender]:
    """Ours first, then those that can run here."""
    result: dict[str, Contender] = {"baton": Baton(path, max_batch)}
    result["transformers"] = Transformers(path)
    if vllm_url is not None:
        result["vllm"] = CompletionsUrl(vllm_url, max_batch)
    elif importlib.util.find_spec("vllm") is not None:
        result["vllm"] = Vllm(path, max_batch)
    return result
