"""Offline generation in one process: colocated prefill and decode, no network.

The oracle: whatever the cluster serves must equal what this gives. Takes and returns token
ids; turning text into tokens is the caller's business.
"""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine import kv_layout
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.kv.policies import check_policy
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.loader import load_model
from baton.engine.model_runner import ModelRunner
from baton.engine.policy_blocks import refusal
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import FinishReason, SampledToken, Sequence, StepOutput
from baton.engine.speculation.build import add_drafts
from baton.kv_policy import parse_policy
from baton.speculate import parse_speculation


@dataclass
class Choice:
    """One continuation of a prompt."""

    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class LLM:
    """`path` is a model folder in Hugging Face layout; other arguments as in EngineConfig,
    `kv_dtype`: "auto" (as the model), "fp8", "int8" or "int4"; `speculate` and `kv_policy` as
    `baton.speculate` and `baton.kv_policy` read them."""

    def __init__(
        self,
        path: str | Path,
        dtype: str = "bfloat16",
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_num_seqs: int = 64,
        chunk_size: int = 512,
        enable_prefix_cache: bool = True,
        kv_dtype: str = "auto",
        speculate: str = "off",
        kv_policy: str = "full",
    ) -> None:
        model, model_config = load_model(Path(path), dtype)
        layout = KVLayout.of(model_config, block_size, kv_layout.kv_dtype(kv_dtype, dtype))
        policy = parse_policy(kv_policy)
        check_policy(policy, model_config, layout)
        self.config = EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=model_config.max_position_embeddings,
            chunk_size=chunk_size,
            enable_prefix_cache=enable_prefix_cache,
            eos_token_ids=model_config.eos_token_ids,
            kv_dtype=layout.dtype,
            num_tail_blocks=layout.num_tail_blocks,
            kv_policy=policy,
            states_per_block=layout.states_per_block,
        )
        cache = KVCache(layout, num_blocks)
        blocks = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_cache,
            model_config.widest_window,
            layout.num_tail_blocks,
        )
        scheduler = DecodeScheduler(self.config, blocks)
        runner, sampler = ModelRunner(model, cache), Sampler(self.config.eos_token_ids)
        speculation = parse_speculation(speculate)
        stepping = add_drafts(speculation, scheduler, runner, sampler, Path(path))
        self.engine = Engine(scheduler, blocks, stepping, sampler)

    def generate(
        self,
        prompts: ListOf[ListOf[int]],
        sampling: SamplingParams | ListOf[SamplingParams],
    ) -> list[list[Choice]]:
        """Choices per prompt, in order. `sampling` is for all prompts or one each."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        seqs = [self._sequence(p, s) for p, s in zip(prompts, params, strict=True)]
        results = {seq.group: [Choice() for _ in range(seq.sampling.n)] for seq in seqs}
        pending = list(reversed(seqs))
        while pending or self.engine.scheduler.has_work():
            while pending and len(self.engine.scheduler.waiting) < self.config.max_queue:
                self.engine.add(pending.pop())
            outputs = self.engine.step()
            if outputs is None:
                raise RuntimeError("sequences are left but none can run")
            for output in outputs:
                _collect(results[output.seq.group], output)
        return [results[seq.group] for seq in seqs]

    def _sequence(self, prompt: ListOf[int], sampling: SamplingParams) -> Sequence:
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        policy = self.config.kv_policy
        longest = len(prompt) + sampling.max_tokens
        if reason := refusal(self.config, policy, len(prompt), longest):
            raise ValueError(f"prompt and max_tokens do not fit: {reason}")
        return Sequence(prompt, sampling, kv_dtype=self.config.kv_dtype, kv_policy=policy)


def _collect(choices: list[Choice], output: StepOutput) -> None:
    if output.token is not None:
        choices[output.choice].tokens.append(output.token)
        choices[output.choice].finish_reason = output.finish_reason
