"""Hashes of a prompt as workers compute them, matches by life, and affinity without an index."""

import dataclasses
import os
import subprocess
import sys
from itertools import accumulate, takewhile

from hypothesis import given
from hypothesis import strategies as st

from baton.block_hash import block_hash, common_blocks, root_hash
from baton.cluster.prefix_index import PrefixMatches, PromptBlocks
from baton.cluster.prefix_index.notes import Note, Notes
from baton.cluster.rendezvous import rendezvous
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from tests.support.redis import LAYOUT, make_record

TOKENS = list(range(100, 165))


def test_a_prompt_has_the_hashes_that_the_engine_gives_its_blocks() -> None:
    for salt in ("", "tenant-a"):
        seq = Sequence(
            TOKENS,
            SamplingParams(),
            fingerprint=LAYOUT.fingerprint,
            kv_dtype=LAYOUT.dtype,
            cache_salt=salt,
        )
        expected = seq.full_block_hashes(LAYOUT.block_size)
        assert PromptBlocks(TOKENS, salt).hashes(LAYOUT) == expected
        assert len(expected) == 4


def test_hashes_are_a_chain_over_full_blocks() -> None:
    first, second, *_ = PromptBlocks(TOKENS).hashes(LAYOUT)
    assert first == block_hash(root_hash(LAYOUT.fingerprint, LAYOUT.dtype), TOKENS[:16])
    assert second == block_hash(first, TOKENS[16:32])


def test_each_block_size_and_model_has_its_own_chain() -> None:
    blocks = PromptBlocks(TOKENS)
    other_size = dataclasses.replace(LAYOUT, block_size=32)
    other_model = dataclasses.replace(LAYOUT, fingerprint="another")
    quantized = dataclasses.replace(LAYOUT, dtype="int8/float32")
    assert blocks.hashes(quantized) != blocks.hashes(LAYOUT)
    assert len(blocks.hashes(other_size)) == 2
    chains = [blocks.hashes(layout) for layout in (LAYOUT, other_size, other_model)]
    assert len({chain[0] for chain in chains}) == 3


def test_the_block_with_the_last_token_is_not_reusable() -> None:
    assert len(PromptBlocks(TOKENS[:64]).reusable_hashes(LAYOUT)) == 3
    assert len(PromptBlocks(TOKENS[:65]).reusable_hashes(LAYOUT)) == 4
    assert PromptBlocks(TOKENS[:1]).reusable_hashes(LAYOUT) == []
    assert PromptBlocks([]).reusable_hashes(LAYOUT) == []


def test_affinity_follows_the_beginning_of_the_prompt_and_the_tenant() -> None:
    prompt = PromptBlocks(TOKENS).affinity
    assert PromptBlocks([*TOKENS, 1, 2, 3]).affinity == prompt
    assert PromptBlocks([0, *TOKENS]).affinity != prompt
    assert PromptBlocks(TOKENS, "tenant-a").affinity != prompt


def test_matches_count_only_for_the_life_that_published_them() -> None:
    matches = PrefixMatches({("decode-0", "life-1"): 3}, {("decode-0", "life-1"): 5})
    first, second = make_record("decode-0", "life-1"), make_record("decode-0", "life-2")
    assert (matches.held_tokens(first), matches.expected_tokens(first)) == (48, 80)
    assert (matches.held_tokens(second), matches.expected_tokens(second)) == (0, 0)


def test_without_an_index_prompts_that_begin_alike_are_guessed_to_be_on_the_same_workers() -> None:
    workers = [make_record(f"{role}-{n}") for role in ("prefill", "decode") for n in range(4)]

    def guess(prompt: PromptBlocks) -> dict[str, int]:
        matches = PrefixMatches.guessed(prompt, workers)
        assert not matches.available and not matches.held
        return {w.worker_id: n for w in workers if (n := matches.expected_tokens(w))}

    first = guess(PromptBlocks(TOKENS))
    assert sorted(name.split("-")[0] for name in first) == ["decode", "prefill"]
    assert set(first.values()) == {64}
    assert guess(PromptBlocks([*TOKENS[:64], 7, 7, 7])) == first
    chosen = {tuple(guess(PromptBlocks([seed, *TOKENS]))) for seed in range(40)}
    assert len(chosen) > 8


def test_a_name_that_leaves_moves_only_its_own_keys() -> None:
    names = [f"worker-{index}" for index in range(8)]
    keys = [bytes([a, b]) for a in range(16) for b in range(16)]
    before = {key: rendezvous(key, names)[0] for key in keys}
    after = {key: rendezvous(key, names[1:])[0] for key in keys}
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == "worker-0"}
    shares = [list(before.values()).count(name) for name in names]
    assert min(shares) > 10


def test_the_order_does_not_depend_on_the_order_of_the_names() -> None:
    assert rendezvous(b"key", ["a", "b", "c"]) == rendezvous(b"key", ["c", "a", "b"])


def test_hashes_do_not_depend_on_the_process() -> None:
    """LMCache/LMCache#1095: a seed per process made every prefix unknown to every other one."""
    program = (
        "from baton.cluster.prefix_index import PromptBlocks;"
        "from tests.support.redis import LAYOUT;"
        "print(PromptBlocks(range(64), 'tenant').hashes(LAYOUT)[-1].hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_notes_are_unknown_to_who_asked_before_they_were_told() -> None:
    notes, note = Notes(limit=3), Note(("w", "1"), 8, [b"a"])
    for _ in range(2):
        with notes.proposed([note]):
            assert list(notes.unknown(notes.given)) == [note]
    assert [len(notes.since(number)) for number in (0, 1, 2)] == [2, 1, 0]
    notes.told = 2
    assert not list(notes.unknown(notes.told)) and list(notes.unknown(1)) == [note]
    with notes.proposed([note, note]):
        pass
    assert len(notes.since(0)) == 3  # bounded


@given(st.lists(st.sampled_from([b"a", b"b"])), st.lists(st.sampled_from([b"a", b"b"])))
def test_chains_share_what_comes_before_their_first_difference(
    one: list[bytes], other: list[bytes]
) -> None:
    chains = [list(accumulate(tokens)) for tokens in (one, other)]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    assert common_blocks(*chains) == len(list(alike))
