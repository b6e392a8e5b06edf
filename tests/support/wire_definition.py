"""What tokens an encoded or converted hand-off must give: prefill's keys and values, taken through
the codec and put into a cache of decode's kind, offline and without any hand-off."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.quantized_sizes import QuantizedSizes
from baton.engine.kv_stores import KVStore, Place
from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence

BLOCK = 4


class Offline:
    """An engine that stops after the prompt, shows its cache, lets it be written, and goes on."""

    def __init__(self, path: Path, kv_dtype: str, kv_policy: str) -> None:
        llm = LLM(
            path,
            "float32",
            num_blocks=256,
            block_size=BLOCK,
            kv_dtype=kv_dtype,
            kv_policy=kv_policy,
            enable_prefix_cache=False,
        )
        self.engine: Any = llm.engine
        self.cache = self.engine._runner.kv_cache
        self.store = KVStore.of(self.cache.layout, torch.float32)
        self._llm = llm

    def prefill(self, prompt: list[int], given: list[int], max_tokens: int) -> Sequence:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        config = self._llm.config
        kinds: dict[str, Any] = {"kv_dtype": config.kv_dtype, "kv_policy": config.kv_policy}
        seq = Sequence(prompt, sampling, output_token_ids=given, choice=0, **kinds)
        self.engine.add(seq)
        while seq.num_output_tokens == len(given):
            self.engine.step()
        return seq

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.cache.slots, self.cache.tables, strict=True))

    def finish(self, seq: Sequence) -> list[int]:
        while self.engine.scheduler.has_work():
            self.engine.step()
        return seq.token_ids[seq.num_prompt_tokens :]


@lru_cache
def _offline(path: Path, kv_policy: str, kv_dtype: str = "") -> Offline:
    """ "" is the plain one that computes prompts."""
    return Offline(path, kv_dtype or "auto", kv_policy)


def _through(codec: str, kv: torch.Tensor) -> torch.Tensor:
    if codec == "raw":
        return kv
    full, shape = len(kv) // BLOCK * BLOCK, kv.shape[1:]
    block_codec = BlockCodec(QuantizedSizes(codec, BLOCK, shape[1], shape[2]))
    done = block_codec.decode(block_codec.encode(kv[:full].view(-1, BLOCK, *shape)))
    return torch.cat((done.view(full, *shape), kv[full:]))


def defined(
    path: Path,
    prompt: list[int],
    codec: str,
    kv_dtype: str = "auto",
    max_tokens: int = 12,
    kv_policy: str = "full",
    given: list[int] | None = None,
) -> list[int]:
    """What the policy and windows leave of prefill's keys and values goes through the codec and
    into a cache of decode's kind, which goes on from prefill's first token. `given`: tokens of the
    answer that are known and computed with the prompt."""
    ours, theirs = _offline(path, kv_policy), _offline(path, kv_policy, kv_dtype)
    sent, here = (o.prefill(prompt, given or [], max_tokens) for o in (ours, theirs))
    count = sent.num_seen_tokens(BLOCK)
    assert count == here.num_seen_tokens(BLOCK)
    for layer, target in zip(ours.layers(), theirs.layers(), strict=True):
        kv = ours.store.read(layer, Place(sent.seen_blocks, []), count)
        place = Place(here.seen_blocks, here.tail_blocks)
        theirs.store.write(target, place, _through(codec, kv.contiguous()))
    here.token_ids[-1] = sent.token_ids[-1]
    ours.finish(sent)
    return theirs.finish(here)
