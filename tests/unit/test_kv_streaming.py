"""Attention sinks: first tokens and a window, at the positions that they have in the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.ops.cpu.kernels import Streams, kernels
from tests.support.families import random_tokens, reference_model
from tests.support.plain_llama import LayerCache, PlainLlama, greedy
from tests.support.policy_engine import assert_alike, generated, policy_llm

CONTEXT = 64


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("llama", spread=0.3, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def path(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    return folder


def by_definition(
    reference: Any, prompt: list[int], max_tokens: int, sinks: int, window: int
) -> tuple[list[int], list[float]]:
    """As in the paper: keys are kept unrotated, what is between sinks and window is thrown away,
    and positions are counted anew in the cache at every step."""
    plain = PlainLlama(reference)

    def attend(cache: LayerCache, position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plain.append(cache, k, v)
        if len(cache.keys) > sinks + window:
            cache.keys = torch.cat((cache.keys[:sinks], cache.keys[-window:]))
            cache.values = torch.cat((cache.values[:sinks], cache.values[-window:]))
        places = torch.arange(len(cache.keys))
        rotated = plain.rotate(q.unsqueeze(0), places[-1:])[0]
        return plain.mix(plain.weights(rotated, plain.rotate(cache.keys, places)), cache.values)

    return greedy(plain, attend, prompt, max_tokens)


@pytest.mark.parametrize(("sinks", "window"), [(4, 16), (3, 9), (0, 12), (5, 6), (4, 1)])
def test_tokens_are_those_of_the_definition_far_beyond_the_context(
    reference: Any, path: Path, sinks: int, window: int
) -> None:
    llm = policy_llm(path, f"streaming(sinks={sinks},window={window})")
    prompts = [random_tokens(length, seed=length) for length in (3, 21, 50)]
    for prompt, found in zip(prompts, generated(llm, prompts, 2 * CONTEXT), strict=True):
        assert_alike(found, by_definition(reference, prompt, 2 * CONTEXT, sinks, window))


@pytest.mark.parametrize("chunk_size", [8, 17, 200])
def test_a_prompt_longer_than_the_context_is_the_same_in_chunks_of_any_size(
    reference: Any, path: Path, chunk_size: int
) -> None:
    llm = policy_llm(path, "streaming(sinks=4,window=16)", chunk_size=chunk_size, num_blocks=80)
    prompt = random_tokens(3 * CONTEXT)
    (found,) = generated(llm, [prompt], 10)
    assert_alike(found, by_definition(reference, prompt, 10, 4, 16))


def test_memory_is_constant_however_long_the_text(path: Path) -> None:
    """Sinks, window, one block that fills and one that empties."""
    llm = policy_llm(path, "streaming(sinks=4,window=16)", num_blocks=1 + 4 + 2 + 4)
    blocks, most = llm.engine.blocks, 0
    allocate = blocks.allocate

    def counted(count: int) -> list[int]:
        nonlocal most
        taken = allocate(count)
        most = max(most, blocks.num_blocks - blocks.num_free)
        return taken

    blocks.allocate = counted  # type: ignore[method-assign]
    generated(llm, [random_tokens(5 * CONTEXT)], 5 * CONTEXT)
    assert most <= 1 + 4 + 2 + 4  # a chunk of 16 tokens besides


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_preempted_sequences_give_the_tokens_that_they_give_alone(
    path: Path, kv_dtype: str
) -> None:
    policy = "streaming(sinks=4,window=16)"
    prompts = [random_tokens(10, seed=i) for i in range(4)]
    alone = [
        generated(policy_llm(path, policy, kv_dtype=kv_dtype), [prompt], 60)[0]
        for prompt in prompts
    ]
    llm = policy_llm(path, policy, kv_dtype=kv_dtype, num_blocks=20, chunk_size=8, max_num_seqs=4)
    together = generated(llm, prompts, 60)
    assert llm.engine.scheduler.num_preemptions > 0
    for found, wanted in zip(together, alone, strict=True):
        assert_alike(found, wanted)


def test_a_prefix_within_the_window_is_shared_and_changes_nothing(path: Path) -> None:
    policy = "streaming(sinks=4,window=40)"
    prompt = random_tokens(30)
    llm = policy_llm(path, policy)
    first = generated(llm, [prompt], 60)[0]
    cached = llm.engine.scheduler.prefill_tokens_cached
    assert_alike(generated(llm, [prompt], 60)[0], first)
    assert llm.engine.scheduler.prefill_tokens_cached - cached == 28


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "gemma2"])
def test_chunks_change_nothing_in_families_with_more_to_them(family: str, tmp_path: Path) -> None:
    """Windows of their own in some layers, two rotary embeddings, norms of heads, soft-capping."""
    reference_model(family, spread=0.3, num_hidden_layers=6).save_pretrained(tmp_path)
    policy, prompt = "streaming(sinks=4,window=16)", random_tokens(70)
    whole = policy_llm(tmp_path, policy, chunk_size=200, num_blocks=100)
    in_parts = policy_llm(tmp_path, policy, chunk_size=8)
    assert_alike(generated(in_parts, [prompt], 80)[0], generated(whole, [prompt], 80)[0])


@pytest.mark.skipif(kernels() is None, reason="no kernels for this CPU")
@pytest.mark.parametrize("sinks", [0, 4, 40])
@pytest.mark.parametrize("window", [1, 24, 100])
def test_kernels_see_what_the_definition_says(sinks: int, window: int) -> None:
    """Three sequences in one batch: a decode step, a chunk, and one without sinks."""
    loaded = kernels()
    assert loaded is not None
    torch.manual_seed(0)
    lengths, queries, size = [150, 90, 70], [1, 30, 5], 16
    q, anchored = (torch.randn(sum(queries), 6, 64).bfloat16() for _ in range(2))
    slots = torch.randn(2, 30 * size, 2, 64).bfloat16()
    tables = torch.randperm(30)[:30].view(3, 10).int()
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)]).int()
    streams = Streams(
        torch.tensor([window, window, 0]).int(), torch.tensor([sinks, sinks, 0]).int()
    )
    shape = (tables, starts, torch.tensor(lengths).int(), size, None, 0.125)
    out = loaded.attention(q, slots, *shape, streams, anchored)
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        rows = (tables[s].long().unsqueeze(1) * size + torch.arange(size)).flatten()[:length]
        keys, values = slots[:, rows].float().repeat_interleave(3, dim=2)
        for i in range(count):
            at, place = int(starts[s]) + i, length - count + i
            near = torch.einsum("hd,thd->ht", q[at].float(), keys) * 0.125
            far = torch.einsum("hd,thd->ht", anchored[at].float(), keys) * 0.125
            places = torch.arange(length)
            is_sink = places < (sinks if s < 2 else 0)
            seen = is_sink | (places > place - window) if s < 2 else places >= 0
            logits = torch.where(is_sink, far, near).masked_fill(~(seen & (places <= place)), -1e9)
            wanted = torch.einsum("ht,thd->hd", logits.softmax(-1), values)
            assert (out[at].float() - wanted).abs().max() < 0.03
