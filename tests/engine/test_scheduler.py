"""The policy: in order, by chunks, the youngest gives way, and everyone comes to the end with the pages that there are."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.kv_cache import PagePool
from weft.engine.params import SamplingParams
from weft.engine.scheduler import Scheduler, Sequence

PAGE = 16


def sequence(number, prompt, budget):
    return Sequence(number=number, prompt=[0] * prompt, params=SamplingParams(max_tokens=budget), budget=budget)


def land(scheduler, sequences):
    """The host learns all that is in flight; finished sequences leave."""
    for one in sequences:
        one.tokens += [0] * one.in_flight
        if len(one.tokens) == one.budget and not one.done:
            scheduler.finish(one)


def follow(device, slots, new_pages):
    """Apply changes to what a device knows: [position, pages] by slot."""
    for slot, index, page in new_pages:
        pages = device[slot][1]
        assert slot not in slots and (len(pages) == index if page else pages[index])
        pages[index : index + 1] = [page]  # in place of one that was given back, or behind them all
    for slot, one in slots.items():
        device.pop(slot, None)
        if one is not None:
            device[slot] = [one.cached - 1, list(one.pages)]


def run(scheduler, sequences, late=0):
    """Steps until all have ended, the host `late` steps behind; what each step read and who went on."""
    history, device, draw = [], {}, random.Random(len(sequences))
    while not all(one.done for one in sequences):
        ranges = [(part.sequence.number, part.start, part.length) for part in scheduler.next_chunk()]
        decoding = scheduler.next_decode()
        if decoding is None:
            land(scheduler, sequences)
            decoding = scheduler.next_decode()
            assert decoding is not None
        assert decoding.slots == [one.slot for one in decoding.sequences]
        if decoding.sequences:
            if draw.random() < 0.2:
                scheduler.compact()
                decoding = scheduler.decoding
            follow(device, *scheduler.changes())
            # The device counts positions by itself.
            expected = {one.slot: [one.cached - 1, one.pages] for one in decoding.sequences}
            assert device == expected and decoding.size == max(expected) + 1
            device = {slot: [position + 1, pages] for slot, (position, pages) in device.items()}
        for one in decoding.sequences:
            assert len(one.pages) * PAGE >= one.cached  # room for what this step writes
        taken = [page for one in scheduler.active for page in one.pages[one.released :]]
        assert all(not any(one.pages[: one.released]) for one in scheduler.active)
        assert len(taken) == len(set(taken)) and 0 not in taken
        assert scheduler.pool.free + len(taken) == scheduler.pool.capacity
        history.append((ranges, [one.number for one in decoding.sequences]))
        if late == 0 or len(history) % 2 == 0 or not (ranges or decoding):
            land(scheduler, sequences)
        assert len(history) < 10_000
    assert scheduler.idle and scheduler.pool.free == scheduler.pool.capacity
    return history


def submitted(scheduler, *sizes, together=()):
    """Sequences of these sizes, those whose numbers are in ``together`` by one call."""
    sequences = [sequence(number, *size) for number, size in enumerate(sizes)]
    for one in sequences:
        one.together = one.number in together
        scheduler.check("prompt", one)
        scheduler.submit(one)
    return sequences


def test_prompts_are_read_in_order_and_all_go_on_together():
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=8, chunk_tokens=64)
    sequences = submitted(scheduler, (20, 3), (30, 2), (30, 2))
    assert run(scheduler, sequences) == [
        ([(0, 0, 20), (1, 0, 30), (2, 0, 14)], [0, 1]),
        ([(2, 14, 16)], [0, 2]),
    ]


def test_prompts_of_one_call_are_read_before_they_decode():
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=8, chunk_tokens=40)
    sequences = submitted(scheduler, (20, 3), (30, 2), (30, 2), together=range(3))
    assert run(scheduler, sequences) == [
        ([(0, 0, 20), (1, 0, 20)], []),
        ([(1, 20, 10), (2, 0, 30)], [0, 1, 2]),
        ([], [0]),
    ]


def test_prompts_of_one_call_decode_where_others_have_no_room():
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=2, chunk_tokens=64)
    history = run(scheduler, submitted(scheduler, (4, 2), (4, 3), (4, 2), together=range(3)))
    assert history[:3] == [([(0, 0, 4), (1, 0, 4)], []), ([], [0, 1]), ([(2, 0, 4)], [1, 2])]


def test_a_request_of_another_call_holds_up_no_decode_step():
    """Whether it came with them or later."""
    for late in (True, False):
        scheduler = Scheduler(PagePool(100, PAGE), max_batch=8, chunk_tokens=16, mixed_chunk_tokens=16)
        first = submitted(scheduler, (12, 30), together=range(1))
        if late:
            scheduler.next_chunk()
            assert scheduler.next_decode().sequences == first
        other = sequence(1, 60, 3)
        other.together = late
        scheduler.submit(other)
        for _ in range(3):
            scheduler.next_chunk()
            assert scheduler.next_decode().sequences == first and not other.running


def test_a_prompt_longer_than_a_chunk_does_not_hold_up_the_others():
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=8, chunk_tokens=16)
    sequences = submitted(scheduler, (8, 5), (40, 1))
    assert run(scheduler, sequences) == [
        ([(0, 0, 8), (1, 0, 8)], [0]),
        ([(1, 8, 16)], [0]),
        ([(1, 24, 16)], [0]),
        ([], [0]),
    ]


@pytest.mark.parametrize(("late", "chunk"), [(True, 16), (False, 48)])
def test_streams_get_a_token_each_step_while_a_long_prompt_is_read_in_small_chunks(late, chunk):
    """One that has waited as long as they have is read in whole chunks."""
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=8, chunk_tokens=48, mixed_chunk_tokens=16)
    streams = submitted(scheduler, *[(12, 30)] * 4)
    long = sequence(4, 200, 3)
    if not late:
        scheduler.submit(long)
    assert sum(part.length for part in scheduler.next_chunk()) == 48
    scheduler.next_decode()
    if late:
        scheduler.submit(long)
    read = []
    while not long.running:
        before = [one.launched for one in streams]
        read.append(sum(part.length for part in scheduler.next_chunk()))
        scheduler.next_decode()
        assert [one.launched for one in streams] == [launched + 1 for launched in before]
    assert max(read) == chunk and sum(read) == 200
    for one in streams:
        scheduler.finish(one)
    scheduler.submit(other := sequence(5, 60, 1))
    scheduler.next_chunk()
    assert other.cached == 16, "beside the answer of the long prompt"


def test_slots_are_waited_for():
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=2, chunk_tokens=64)
    sequences = submitted(scheduler, (4, 2), (4, 3), (4, 2))
    history = run(scheduler, sequences)
    assert history[0] == ([(0, 0, 4), (1, 0, 4)], [0, 1])
    assert history[1] == ([(2, 0, 4)], [1, 2])


def test_the_youngest_gives_its_pages_back_and_is_read_again_with_its_answer():
    scheduler = Scheduler(PagePool(1 + 3, PAGE), max_batch=4, chunk_tokens=64)
    sequences = submitted(scheduler, (15, 30), (15, 20))
    history = run(scheduler, sequences)
    assert scheduler.preemptions >= 1
    again = [part for ranges, _ in history for part in ranges if part[0] == 1 and part[1] == 0]
    assert [length for _, _, length in again][0] == 15
    assert all(length > 15 for _, _, length in again[1:]) and len(again) == 1 + scheduler.preemptions


def test_only_sequences_that_may_grow_have_a_page_kept_for_them():
    def active(*sizes):
        scheduler = Scheduler(PagePool(1 + 2, PAGE), max_batch=2, chunk_tokens=64)
        sequences = submitted(scheduler, *sizes)
        scheduler.next_chunk()
        return [one.number for one in sequences if one.slot is not None]

    assert active((10, 7), (10, 7)) == [0, 1]  # of 17 tokens 16 are cached
    assert active((10, 8), (10, 7)) == [0]


def test_a_request_that_could_not_run_even_alone_is_refused_by_the_caller_s_name():
    scheduler = Scheduler(PagePool(1 + 4, PAGE), max_batch=4, chunk_tokens=64)
    scheduler.check("prompts[7]", sequence(0, 40, 25))  # 64 tokens are cached, the last one never
    with pytest.raises(
        ValueError, match=r"prompts\[7\] of 40 tokens and an answer of up to 26 need 5 KV pages of 16 .* raise pages="
    ):
        scheduler.check("prompts[7]", sequence(0, 40, 26))


def test_a_window_s_pages_are_all_that_a_sequence_keeps():
    """40 tokens lie in up to 4 pages; a chunk of 32 more beside them in 6."""
    scheduler = Scheduler(PagePool(1 + 6, PAGE, window=40), max_batch=4, chunk_tokens=32)
    [one] = submitted(scheduler, (200, 300))
    held = []
    while not one.done:
        scheduler.next_chunk()
        held.append(one.held)
        scheduler.next_decode()
        land(scheduler, [one])
        assert scheduler.pool.free + one.held == 6
    # Read in whole chunks; then what lies before the window is given back whenever a page is taken.
    assert len(held) == 7 + 300 - 2 and max(held) == 6 and set(held[20:]) == {4}
    scheduler.check("prompt", sequence(1, 10_000, 10_000))
    small = Scheduler(PagePool(1 + 3, PAGE, window=40), max_batch=4, chunk_tokens=32)
    with pytest.raises(ValueError, match="need 4 KV pages of 16 tokens, and there are 3"):
        small.check("prompt", sequence(1, 10_000, 10_000))
    small.check("prompt", sequence(1, 30, 19))


def test_long_sequences_with_windows_run_side_by_side():
    """Each keeps 3 pages, is read with 4, and would take 10 without a window."""
    scheduler = Scheduler(PagePool(1 + 7, PAGE, window=30), max_batch=4, chunk_tokens=16)
    history = run(scheduler, submitted(scheduler, (60, 100), (60, 100)))
    assert scheduler.preemptions == 0 and sum(decoding == [0, 1] for _, decoding in history) > 80


def test_slots_are_filled_up_from_below():
    scheduler = Scheduler(PagePool(100, PAGE), max_batch=8, chunk_tokens=64)
    sequences = submitted(scheduler, *[(4, 9)] * 5)
    scheduler.next_chunk()
    for one in sequences[:3]:
        scheduler.finish(one)
    assert [one.slot for one in sequences[3:]] == [3, 4]
    assert scheduler.compact() == [(4, 0), (3, 1)]
    assert [one.slot for one in sequences[3:]] == [1, 0]
    assert scheduler.compact() == []


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8),
    pages=st.integers(7, 12),
    max_batch=st.integers(1, 4),
    chunk_tokens=st.integers(1, 80),
    late=st.integers(0, 1),
    window=st.sampled_from([None, 1, 16, 40, 97]),
    together=st.sampled_from([(), range(8), range(3), range(2, 8)]),
)
def test_everyone_comes_to_the_end_whatever_the_sizes(sizes, pages, max_batch, chunk_tokens, late, window, together):
    scheduler = Scheduler(PagePool(1 + pages, PAGE, window), max_batch, chunk_tokens)
    sequences = submitted(scheduler, *sizes, together=together)
    history = run(scheduler, sequences, late)
    first_reads = [part[0] for ranges, _ in history for part in ranges if part[1] == 0]
    assert list(dict.fromkeys(first_reads)) == list(range(len(sizes)))  # admitted in order
    assert all(sum(length for _, _, length in ranges) <= chunk_tokens for ranges, _ in history)
