"""Small random models of every family, ours and the transformers reference with equal weights."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.kv_cache import KVCache, KVLayout
from baton.engine.model_config import ModelConfig
from baton.engine.model_runner import ModelRunner
from baton.engine.models.decoder import DecoderModel
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import ScheduledBatch, ScheduledSequence, Sequence

BLOCK_SIZE = 4
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def reference_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32 whose every weight, biases and norms too, is random."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            weight.normal_(centre, 0.1)
    return model


def hf_config(reference: Any) -> dict[str, Any]:
    values = reference.config.to_dict()
    return {**values, "architectures": [type(reference).__name__]}


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """(token, vocab) logits of one forward pass over all tokens."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].float()


@dataclass
class Rig:
    """A model runner with its cache, and a hand that gives out scattered blocks."""

    runner: ModelRunner
    free: list[int]
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def cache(self) -> KVCache:
        return self.runner.kv_cache

    def sequence(self, token_ids: list[int], room: int = 0) -> Sequence:
        seq = Sequence(token_ids, SamplingParams())
        size = self.cache.layout.block_size
        count = -(-(len(token_ids) + room) // size)
        seq.block_table = [self.free.pop() for _ in range(count)]
        return seq

    def step(self, *work: tuple[Sequence, int]) -> torch.Tensor:
        """Feeds so many tokens of each sequence and marks them computed."""
        items = [ScheduledSequence(seq, count) for seq, count in work]
        logits = self.runner.run(ScheduledBatch(items))
        for seq, count in work:
            seq.num_computed_tokens += count
        return logits

    def prefill(self, token_ids: list[int], room: int = 0) -> tuple[Sequence, torch.Tensor]:
        seq = self.sequence(token_ids, room)
        return seq, self.step((seq, len(token_ids)))


def make_rig(
    reference: Any,
    num_blocks: int = 200,
    scattered: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Rig:
    weights = reference.state_dict()
    config = ModelConfig.from_hf(hf_config(reference))
    with torch.inference_mode():
        model = DecoderModel(config, lambda name, shape: weights[name].view(shape).to(dtype))
    name = str(dtype).removeprefix("torch.")
    cache = KVCache(KVLayout.of(config, BLOCK_SIZE, name), num_blocks)
    free = list(range(num_blocks))
    if scattered:
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
    return Rig(ModelRunner(model, cache), free)


def random_tokens(count: int, seed: int = 0, vocab: int = 101) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()
