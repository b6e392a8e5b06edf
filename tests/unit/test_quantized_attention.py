"""A quantized cache: each token sees its own group as computed, and the groups before quantized.

The reference here goes token by token and knows nothing of batches, chunks or tails.
"""

from typing import Any

import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.llm import LLM
from baton.engine.model_config import ModelConfig
from baton.engine.model_runner import ModelRunner
from baton.engine.sampling_params import SamplingParams
from tests.support.families import (
    BLOCK_SIZE,
    Rig,
    hf_config,
    make_rig,
    random_tokens,
    reference_model,
)

KINDS = ("fp8", "int8", "int4")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 7}),
    "kernels": ("llama", {"head_dim": 32}),
    "softcap": ("gemma2", {"attn_logit_softcapping": 2.0}),
}


def quantized_rig(reference: Any, kind: str) -> Rig:
    rig = make_rig(reference)
    config = ModelConfig.from_hf(hf_config(reference))
    layout = KVLayout.of(config, BLOCK_SIZE, f"{kind}/float32")
    cache = KVCache(layout, 200)
    # Whatever was in a block before must not matter.
    cache.data.random_(0, 256, generator=torch.Generator().manual_seed(1))
    return TailRig(ModelRunner(rig.runner.model, cache), rig.free)


class TailRig(Rig):
    def sequence(self, token_ids: list[int], room: int = 0) -> Any:
        seq = super().sequence(token_ids, room)
        seq.tail_blocks = [self.free.pop() for _ in range(self.cache.layout.num_tail_blocks)]
        return seq


def logits_token_by_token(reference: Any, kind: str, tokens: list[int]) -> torch.Tensor:
    """(token, vocab). The transformers model, one token at a time, over a cache whose full
    groups are replaced by what the codec makes of them once the token that fills them is done."""
    from transformers import DynamicCache

    config = ModelConfig.from_hf(hf_config(reference))
    codec = BlockCodec(KVLayout.of(config, BLOCK_SIZE, f"{kind}/float32").quantized)  # type: ignore[arg-type]
    cache, rows = DynamicCache(), []
    for position, token in enumerate(tokens):
        with torch.no_grad():
            out = reference(torch.tensor([[token]]), cache=cache, use_cache=True)
        rows.append(out.logits[0, -1])
        end = position + 1
        if end % BLOCK_SIZE:
            continue
        for layer in cache.layers:
            group = slice(end - BLOCK_SIZE, end)
            kv = torch.stack((layer.keys[0, :, group], layer.values[0, :, group]))
            block = codec.decode(codec.encode(kv.permute(2, 0, 1, 3).unsqueeze(0)))[0]
            layer.keys[0, :, group], layer.values[0, :, group] = block.permute(1, 2, 0, 3)
    return torch.stack(rows)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_decode_steps_have_the_logits_of_the_definition(kind: str, model: str) -> None:
    model_type, changes = MODELS[model]
    reference = reference_model(model_type, **changes)
    tokens = random_tokens(30)
    expected = logits_token_by_token(reference, kind, tokens)
    rig = quantized_rig(reference, kind)
    for chunks in ((13,), (3, 2, 1, 7), (4, 4, 5)):
        seq = rig.sequence(tokens[:13], room=20)
        for chunk in chunks:
            logits = rig.step((seq, chunk))
        for position in range(13, 30):
            # A value on the border of two steps may fall to the other: about 1e-3 in a logit.
            assert (logits[0] - expected[position - 1]).abs().max() <= 4e-3, (chunks, position)
            seq.token_ids.append(tokens[position])
            logits = rig.step((seq, 1))


def test_quantization_changes_logits_a_little_and_int4_most() -> None:
    """So the test above would notice a cache that is not quantized at all."""
    reference = reference_model("llama")
    tokens = random_tokens(37)
    _, exact = make_rig(reference).prefill(tokens)
    off = {k: (quantized_rig(reference, k).prefill(tokens)[1] - exact).abs().max() for k in KINDS}
    assert 0 < off["int8"] < off["fp8"] < off["int4"] < 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_gives_what_each_sequence_gives_alone(kind: str) -> None:
    """Bit for bit where kernels read in place."""
    reference = reference_model("llama")
    rig = quantized_rig(reference, kind)
    atol = 0 if rig.runner.model.reads_in_place else 1e-4
    prompts = [random_tokens(n, n) for n in (1, 3, 4, 7, 22)]
    seqs = [rig.prefill(p, room=4)[0] for p in prompts]
    newcomer = rig.sequence(random_tokens(9, 9))
    for seq in seqs:
        seq.token_ids.append(50)
    together = rig.step(*((seq, 1) for seq in seqs), (newcomer, 9))
    for index, prompt in enumerate([*prompts, None]):
        alone = quantized_rig(reference, kind)
        seq = alone.sequence(random_tokens(9, 9) if prompt is None else prompt, room=4)
        logits = alone.step((seq, len(seq.token_ids)))
        if prompt is not None:
            seq.token_ids.append(50)
            logits = alone.step((seq, 1))
        torch.testing.assert_close(together[index], logits[0], rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_chunks_batches_prefix_hits_or_preemption(
    kind: str, tmp_path: Any
) -> None:
    reference_model("llama", spread=0.4).save_pretrained(tmp_path)
    prompts = [random_tokens(n, 3) for n in (5, 21, 37)]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=1)
    sampled = SamplingParams(temperature=0.7, seed=3, max_tokens=30, ignore_eos=True, n=3)

    def run(**limits: Any) -> tuple[Any, LLM]:
        values = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8, **limits}
        llm = LLM(tmp_path, "float32", kv_dtype=kind, **values)
        texts = [
            [[c.token_ids for c in choices] for choices in llm.generate(prompts, sampling)]
            for sampling in (greedy, sampled, greedy)
        ]
        llm.engine.blocks.check_integrity([])
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
        return texts, llm

    expected, _ = run(enable_prefix_cache=False)
    assert expected[0] == expected[2]
    for limits in ({"chunk_size": 9}, {"chunk_size": 8, "num_blocks": 44}):
        texts, llm = run(**limits)
        assert texts == expected
        assert llm.engine.scheduler.prefill_tokens_cached > 0
    assert llm.engine.scheduler.num_preemptions > 0


def test_a_cache_of_latents_is_refused() -> None:
    config = ModelConfig.from_hf(hf_config(reference_model("deepseek_v2")))
    with pytest.raises(ValueError, match="a cache of latents cannot be int8/float32"):
        KVLayout.of(config, 4, "int8/float32")
