"""SnapKV and H2O: the tokens of their definitions, in whatever batches, chunks and pools."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.families import random_tokens, reference_model
from tests.support.plain_llama import LayerCache, PlainLlama, greedy
from tests.support.policy_engine import assert_alike, generated, policy_llm, sampling

Found = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("llama", spread=0.3, max_position_embeddings=256)


@pytest.fixture(scope="module")
def path(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    return folder


class Evicting(PlainLlama):
    """Each KV head has its own tokens; `scores` and `places` of a cache are (kv_head, token)."""

    def __init__(self, reference: Any) -> None:
        super().__init__(reference)
        self.queries: dict[int, list[Tensor]] = defaultdict(list)
        self.scores: dict[int, Tensor] = {}
        self.places: dict[int, Tensor] = {}

    def attend(self, cache: LayerCache, position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.tensor([position])
        self.append(cache, self.rotate(k.unsqueeze(0), at)[0], v)
        rotated = self.rotate(q.unsqueeze(0), at)[0]
        weights = self.weights(rotated, cache.keys)
        self.queries[id(cache)].append(rotated)
        more = weights.view(-1, self.group, weights.shape[1]).sum(1)
        known = self.scores.get(id(cache), more[:, :0])
        self.scores[id(cache)] = torch.cat((known, torch.zeros(len(more), 1)), dim=1) + more
        places = self.places.get(id(cache), torch.empty(len(more), 0, dtype=torch.long))
        self.places[id(cache)] = torch.cat((places, at.expand(len(more), 1)), dim=1)
        out = self.mix(weights, cache.values)
        self.evict(cache, position)
        return out

    def evict(self, cache: LayerCache, position: int) -> None:
        raise NotImplementedError

    def keep(self, cache: LayerCache, index: Tensor) -> None:
        """(kv_head, kept) of each head."""
        by_token = index.T.unsqueeze(-1).expand(-1, -1, self.head_dim)
        cache.keys, cache.values = cache.keys.gather(0, by_token), cache.values.gather(0, by_token)
        self.scores[id(cache)] = self.scores[id(cache)].gather(1, index)
        self.places[id(cache)] = self.places[id(cache)].gather(1, index)


def snapkv(
    reference: Any, prompt: list[int], count: int, max_tokens: int, window: int, kernel: int
) -> Found:
    """`count` tokens of the prompt are kept."""

    class Plain(Evicting):
        def evict(self, cache: LayerCache, position: int) -> None:
            if position != len(prompt) - 1 or count >= len(prompt):
                return
            first, heads = len(prompt) - window, cache.keys.shape[1]
            scores = torch.zeros(heads, len(prompt))
            for place in range(first, len(prompt)):
                seen = self.weights(self.queries[id(cache)][place], cache.keys[: place + 1])
                scores[:, : place + 1] += seen.view(heads, self.group, -1).sum(1)
            index = []
            for head in range(heads):
                pooled = [
                    max(scores[head, max(0, i - kernel // 2) : min(first, i + kernel // 2 + 1)])
                    for i in range(first)
                ]
                best = sorted(range(first), key=lambda i: (-pooled[i], i))[: count - window]
                index.append(sorted(best) + list(range(first, len(prompt))))
            self.keep(cache, torch.tensor(index))

    plain = Plain(reference)
    return greedy(plain, plain.attend, prompt, max_tokens)


def h2o(reference: Any, prompt: list[int], budget: int, max_tokens: int) -> Found:
    class Plain(Evicting):
        def evict(self, cache: LayerCache, position: int) -> None:
            while position >= len(prompt) - 1 and cache.keys.shape[0] > budget:
                stays = self.places[id(cache)] > position - budget // 2
                worst = self.scores[id(cache)].masked_fill(stays, torch.inf).argmin(1)
                index = [
                    [i for i in range(cache.keys.shape[0]) if i != int(worst[head])]
                    for head in range(cache.keys.shape[1])
                ]
                self.keep(cache, torch.tensor(index))

    plain = Plain(reference)
    return greedy(plain, plain.attend, prompt, max_tokens)


@pytest.mark.parametrize("chunk_size", [8, 30, 200])
@pytest.mark.parametrize(("budget", "count"), [("0.25", 25), ("40", 40), ("100%", 100)])
def test_snapkv_keeps_what_the_last_tokens_attend_to(
    reference: Any, path: Path, budget: str, count: int, chunk_size: int
) -> None:
    policy = f"snapkv(budget={budget},window=12,kernel=5)"
    llm = policy_llm(path, policy, chunk_size=chunk_size)
    prompt = random_tokens(100)
    wanted = snapkv(reference, prompt, count, 30, 12, 5)
    assert_alike(generated(llm, [prompt], 30)[0], wanted)
    # Again, with the prompt's blocks in the prefix cache: all but the window's.
    assert_alike(generated(llm, [prompt], 30)[0], wanted)
    reused = 99 if count == 100 else 100 - 12
    assert llm.engine.scheduler.prefill_tokens_cached == reused // 4 * 4


@pytest.mark.parametrize("chunk_size", [8, 200])
@pytest.mark.parametrize(("budget", "length"), [("24", 60), ("24", 10), ("7", 25), ("0.5", 50)])
def test_h2o_keeps_heavy_hitters_and_the_newest(
    reference: Any, path: Path, budget: str, length: int, chunk_size: int
) -> None:
    llm = policy_llm(path, f"h2o(budget={budget})", chunk_size=chunk_size)
    prompt = random_tokens(length)
    wanted = h2o(reference, prompt, 25 if budget == "0.5" else int(budget), 60)
    assert_alike(generated(llm, [prompt], 60)[0], wanted)


@pytest.mark.parametrize(
    ("policy", "kv_dtype", "num_blocks"),
    [
        ("snapkv(budget=0.5,window=8)", "auto", 26),
        ("snapkv(budget=0.5,window=8)", "int8", 38),
        ("h2o(budget=16)", "auto", 14),
    ],
)
def test_together_and_preempted_they_give_the_tokens_of_one_alone(
    path: Path, policy: str, kv_dtype: str, num_blocks: int
) -> None:
    prompts = [random_tokens(n, seed=n) for n in (5, 14, 6, 20, 7, 3, 4, 26)]
    alone = [
        generated(policy_llm(path, policy, kv_dtype=kv_dtype), [prompt], 40)[0]
        for prompt in prompts
    ]
    sizes = {"num_blocks": num_blocks, "chunk_size": 8, "max_num_seqs": 8}
    tight = policy_llm(path, policy, kv_dtype=kv_dtype, **sizes)
    found = generated(tight, prompts, 40)
    assert tight.engine.scheduler.num_preemptions > 0
    # A value that rounds the other way moves an int8 cache by a step.
    tolerance = 1e-3 if kv_dtype == "auto" else 0.03
    for one, other in zip(found, alone, strict=True):
        assert_alike(one, other, tolerance)


@pytest.mark.parametrize("policy", ["snapkv(budget=0.5,window=8)", "h2o(budget=16)"])
def test_choices_of_one_prompt_part_ways_without_touching_each_other(
    path: Path, policy: str
) -> None:
    prompt = random_tokens(40)
    params = sampling(30, n=3, seed=7)
    params = type(params)(**{**vars(params), "temperature": 1.0})
    (together,) = policy_llm(path, policy).generate([prompt], params)
    assert len({tuple(choice.token_ids) for choice in together}) == 3
    tight = policy_llm(path, policy, num_blocks=26, chunk_size=8)
    (again,) = tight.generate([prompt], params)
    assert [c.token_ids for c in again] == [c.token_ids for c in together]
    tight.engine.blocks.check_integrity([])


def test_a_constant_number_of_blocks_serves_a_long_answer(path: Path) -> None:
    llm = policy_llm(path, "h2o(budget=16)", num_blocks=15)
    generated(llm, [random_tokens(20)], 200)
    assert llm.engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("family", "policy", "reason"),
    [
        ("gpt2", "streaming(window=16)", "learned positions"),
        ("mistral", "streaming(window=16)", "window of its own"),
        ("deepseek_v2", "streaming(window=16)", "latents"),
        ("deepseek_v2", "snapkv(budget=40)", "latents"),
        ("gemma2", "h2o(budget=40)", "layers with a window"),
        ("llama", "h2o(budget=40)", "share scales"),
        ("llama", "streaming(window=500)", "more than the model's context of 128"),
    ],
)
def test_what_a_model_cannot_have_is_a_sentence(
    family: str, policy: str, reason: str, tmp_path: Path
) -> None:
    changes = {"sliding_window": 7} if family == "mistral" else {}
    reference_model(family, **changes).save_pretrained(tmp_path)
    kv_dtype = "int8" if "scales" in reason else "auto"
    with pytest.raises(ValueError, match=reason):
        policy_llm(tmp_path, policy, kv_dtype=kv_dtype)


def test_learned_positions_go_with_eviction(tmp_path: Path) -> None:
    reference_model("gpt2", spread=0.3).save_pretrained(tmp_path)
    prompt = random_tokens(60)
    for policy in ("snapkv(budget=20,window=8)", "h2o(budget=20)"):
        whole, parts = (policy_llm(tmp_path, policy, chunk_size=n) for n in (100, 8))
        assert_alike(generated(whole, [prompt], 20)[0], generated(parts, [prompt], 20)[0])
