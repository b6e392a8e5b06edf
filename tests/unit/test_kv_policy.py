"""The notation of KV policies and their arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_policy import FULL, H2O, KVPolicy, SnapKV, Streaming, parse_policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", FULL),
        ("streaming", Streaming()),
        (" streaming( window = 7 ) ", Streaming(sinks=4, window=7)),
        ("snapkv(budget=25%)", SnapKV(budget=0.25)),
        ("snapkv(budget=100, window=16)", SnapKV(budget=100, window=16)),
        ("h2o(budget=64)", H2O(budget=64)),
        ("h2o(budget=0.00001)", H2O(budget=0.00001)),
        ("h2o(budget=33.333333333%)", H2O(budget=0.333333333)),
        ("h2o(budget=100%)", H2O(budget=1.0)),
    ],
)
def test_a_policy_reads_as_it_is_written(text: str, policy: KVPolicy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a policy"),
        ("lru", "not a policy"),
        ("full(x=1)", "takes nothing"),
        ("streaming(4)", "takes sinks, window"),
        ("streaming(window=0)", "window must be at least 1"),
        ("streaming(window=-3)", "window must be a number"),
        ("streaming(window=1.5)", "window must be a number"),
        ("streaming(window=1,window=2)", "takes sinks, window"),
        ("snapkv(budget=0)", "above 32 tokens"),
        ("snapkv(budget=0%)", "above 0"),
        ("snapkv(budget=101%)", "at most 100 %"),
        ("snapkv(budget=0.5,kernel=4)", "odd"),
        # Once taken: pooling over it held up a prefill worker for minutes.
        ("snapkv(budget=0.5,kernel=999999999)", "odd number up to 255"),
        ("snapkv(budget=9000,window=8000)", "window must be from 1 to 512"),
        ("h2o(budget=1)", "above 1 tokens"),
        ("h2o(budget=５１２)", "must be a number"),
        ("h2o(budget=99999999999)", "must be a number"),
    ],
)
def test_a_wrong_policy_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_policy(text)


POLICIES = st.one_of(
    st.builds(Streaming, sinks=st.integers(0, 40), window=st.integers(1, 100)),
    st.builds(SnapKV, budget=st.floats(0.01, 1), window=st.integers(1, 40)),
    st.builds(H2O, budget=st.integers(2, 100)),
)


@given(POLICIES, st.integers(1, 300), st.integers(0, 300), st.sampled_from([1, 4, 16]))
def test_what_is_kept_fits_into_the_blocks_that_were_counted(
    policy: KVPolicy, prompt: int, output: int, size: int
) -> None:
    table, compact, states = policy.blocks(prompt + output, prompt, size)
    room = compact or table
    for num_tokens in range(prompt, prompt + output + 1):
        kept = policy.kept(num_tokens, prompt, size)
        assert 0 <= kept <= num_tokens and kept <= room * size
        if policy.keeps_state:
            assert kept < states
    assert policy.reusable(prompt, prompt) < prompt


@given(st.integers(0, 20), st.integers(1, 60), st.integers(1, 300), st.sampled_from([1, 4, 16]))
def test_streaming_never_drops_what_the_next_token_sees(
    sinks: int, window: int, num_tokens: int, size: int
) -> None:
    """What is dropped begins after the blocks of the sinks and ends before the window."""
    dropped = num_tokens - Streaming(sinks, window).kept(num_tokens, 1, size)
    first = -(-sinks // size) * size
    assert dropped % size == 0
    assert dropped == 0 or first + dropped <= num_tokens + 1 - window
