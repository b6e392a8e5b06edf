"""Small random models of every family, ours and the transformers reference with equal weights."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.kv_cache import KVCache, KVLayout
from baton.engine.model_config import ModelConfig
from baton.engine.model_runner import ModelRunner
from baton.engine.models.checkpoint_names import TensorSource, source_for
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


GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 12, "sliding_window": 5},
    "gemma3_text": {"query_pre_attn_scalar": 12, "sliding_window": 5},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0},
    "deepseek_v2": {
        "num_key_value_heads": 6,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}


def _centre(model_type: str, name: str) -> float:
    """Norms scatter around their neutral weight, which Gemma stores as 0."""
    is_norm = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
    return 1.0 if is_norm and not model_type.startswith("gemma") else 0.0


def reference_model(model_type: str, seed: int = 0, spread: float = 0.1, **changes: Any) -> Any:
    """A transformers model in float32 whose every weight, biases and norms too, is random."""
    torch.manual_seed(seed)
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    config = AutoConfig.for_model(model_type, **{**sizes, **EXTRA.get(model_type, {}), **changes})
    # Soft-capping is not computed by the fused attention of torch.
    config._attn_implementation = "eager" if model_type.startswith("gemma") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(_centre(model_type, name), spread)
    return model


def hf_config(reference: Any) -> dict[str, Any]:
    values = reference.config.to_dict()
    return {**values, "architectures": [type(reference).__name__]}


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """(token, vocab) logits of one forward pass over all tokens."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].float()


def checkpoint_of(reference: Any) -> dict[str, torch.Tensor]:
    """The tensors as `save_pretrained` writes them: experts one by one."""
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


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
    weights = checkpoint_of(reference)
    config = ModelConfig.from_hf(hf_config(reference))
    read: TensorSource = lambda name, shape: weights[name].view(shape).to(dtype)  # noqa: E731
    with torch.inference_mode():
        model = DecoderModel(config, source_for(config, weights, read))
    name = str(dtype).removeprefix("torch.")
    cache = KVCache(KVLayout.of(config, BLOCK_SIZE, name), num_blocks)
    free = list(range(num_blocks))
    if scattered:
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
    return Rig(ModelRunner(model, cache), free)


def random_tokens(count: int, seed: int = 0, vocab: int = 101) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()
