"""Memory for weights and KV blocks."""

import threading

import torch

from baton.engine.huge_pages import Arena, mapped


def test_what_is_mapped_is_zeros() -> None:
    assert not mapped(5000).any()


def test_parts_of_an_arena_are_aligned_and_apart_whatever_their_size() -> None:
    arena = Arena()
    shapes = [(3, torch.bfloat16), (1000, torch.float32), (20 << 20, torch.bfloat16)]
    parts = [arena.empty(count, dtype).fill_(i) for i, (count, dtype) in enumerate(shapes * 2)]
    assert [(len(part), part.dtype) for part in parts] == shapes * 2
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert all((part == i).all() for i, part in enumerate(parts))


def test_threads_get_parts_of_their_own() -> None:
    arena = Arena()
    parts: list[torch.Tensor] = []

    def take() -> None:
        parts.extend(arena.empty(7, torch.float32) for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({part.data_ptr() for part in parts}) == 800
