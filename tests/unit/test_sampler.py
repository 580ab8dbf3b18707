"""The order of an epoch is a function of (seed, epoch), the same for every rank and every year."""

from __future__ import annotations

from sft_toolkit.data.sampler import EpochSampler


def order(size: int, seed: int, epoch: int) -> list[int]:
    sampler = EpochSampler(size, seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_order_of_an_epoch_is_fixed_for_ever() -> None:
    # Written down: a checkpoint of last year must find its place in the same order.
    assert order(8, seed=42, epoch=0) == [4, 1, 3, 6, 0, 7, 2, 5]
    assert order(8, seed=42, epoch=1) == [1, 2, 5, 3, 6, 0, 4, 7]
    assert order(8, seed=43, epoch=0) == [2, 1, 5, 7, 4, 0, 6, 3]


def test_every_row_comes_once_in_every_epoch() -> None:
    for epoch in range(3):
        assert sorted(order(1000, seed=7, epoch=epoch)) == list(range(1000))


def test_iterating_twice_without_set_epoch_gives_the_same_order() -> None:
    sampler = EpochSampler(50, seed=1)
    assert list(sampler) == list(sampler)


def test_without_shuffle_rows_come_as_they_are() -> None:
    sampler = EpochSampler(4, seed=42, shuffle=False)
    sampler.set_epoch(3)
    assert list(sampler) == [0, 1, 2, 3]
    assert len(sampler) == 4


def test_blanks_at_the_end_even_out_the_ranks() -> None:
    sampler = EpochSampler(5, seed=0, shuffle=False, pad_to_multiple_of=4)
    assert list(sampler) == [0, 1, 2, 3, 4, -1, -1, -1]
    assert len(sampler) == 8
    shuffled = EpochSampler(5, seed=0, pad_to_multiple_of=3)
    assert shuffled.order(2)[-1] == -1
    assert sorted(shuffled.order(2)) == [-1, 0, 1, 2, 3, 4]
    assert list(EpochSampler(4, seed=0, shuffle=False, pad_to_multiple_of=4)) == [0, 1, 2, 3]


def test_the_order_of_any_epoch_can_be_asked_without_moving_the_sampler() -> None:
    sampler = EpochSampler(8, seed=42)
    assert sampler.order(1) == order(8, seed=42, epoch=1)
    assert list(sampler) == order(8, seed=42, epoch=0)


def test_the_rows_of_an_update_are_counted_from_the_start_of_the_run() -> None:
    sampler = EpochSampler(5, seed=0, shuffle=False, pad_to_multiple_of=2)
    assert [sampler.of_update(update, 4) for update in range(3)] == [[0, 1, 2, 3], [4], [0, 1, 2, 3]]
    shuffled = EpochSampler(8, seed=42)
    assert shuffled.of_update(1, 4) == shuffled.order(0)[4:]
    assert shuffled.of_update(2, 4) == shuffled.order(1)[:4]
