"""Prefix caching: pages are shared by what they hold, never written while shared, and never lost."""

from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import weft
from weft.engine import Engine
from weft.engine.kv_cache import PagePool, digest_of
from weft.engine.params import SamplingParams
from weft.engine.scheduler import Scheduler, Sequence

PAGE = 4


class Pool(PagePool):
    """A pool that says which pages were taken to write to."""

    taken = ()

    def take(self, count):
        pages = super().take(count)
        self.taken += tuple(pages)
        return pages


class Device:
    """What the kernels of a batch would write, read and choose: tokens stand for keys."""

    def __init__(self, pages, max_batch, chunk_tokens, window=None):
        self.window = window
        self.scheduler = Scheduler(Pool(1 + pages, PAGE, window), max_batch, chunk_tokens, prefix_caching=True)
        self.holds = {}  # (page, offset) → the tokens up to there
        self.texts = {}  # prompt and answer, tokens in flight included
        self.open = []

    def play(self, events):
        """Do all events, then step until nothing is open; a check after each."""
        pages = self.scheduler.pool.free
        for name, *given_ in events:
            if name == "leave":
                if self.open:
                    self.leave(self.open[given_[0] % len(self.open)])
            else:
                getattr(self, name)(*given_)
            self.check()
        for steps in range(1000):
            if not self.open:
                break
            self.step(steps % 2 == 0)
        assert self.scheduler.idle and self.scheduler.pool.free == pages

    def submit(self, prompt, budget, salt=None):
        params = SamplingParams(cache_salt=salt)
        one = Sequence(number=len(self.texts), prompt=prompt, params=params, budget=budget)
        if self.scheduler.pool.needed_at_once(len(prompt) + budget - 1) > self.scheduler.pool.capacity:
            return
        self.scheduler.submit(one)
        self.texts[one.number] = list(prompt)
        self.open.append(one)

    def step(self, collect):
        pool = self.scheduler.pool
        before, pool.taken = set(pool._digest_of), ()
        ranges = self.scheduler.next_chunk()
        self.shared = before - {*pool.taken}
        for part in ranges:
            self.run(part.sequence, part.start, part.start + part.length, part.last)
        decoding = self.scheduler.next_decode()
        if decoding is None:
            self.collect()
            decoding = self.scheduler.next_decode()
        self.shared = set(pool._digest_of)
        for one in decoding.sequences:
            self.run(one, one.cached - 1, one.cached, chooses=True)
        if collect:
            self.collect()
        self.check()

    def run(self, one, start, end, chooses):
        text, pool = self.texts[one.number], self.scheduler.pool
        for at in range(0 if self.window is None else max(0, start + 1 - self.window), end):
            cell = (one.pages[at // PAGE], at % PAGE)
            if at >= start:
                assert pool._references[cell[0]] == 1 and cell[0] not in self.shared, "a shared page is written"
                self.holds[cell] = text[: at + 1]
            assert self.holds[cell] == text[: at + 1], "a page of other tokens is read"
        if chooses:
            assert end == len(text)
            text.append(sum(text) % 2)

    def collect(self):
        for one in self.open.copy():
            one.tokens += self.texts[one.number][len(one.prompt) + len(one.tokens) :]
            if len(one.tokens) == one.budget:
                self.leave(one)

    def leave(self, one):
        free = self.scheduler.pool.free
        alone = sum(self.scheduler.pool._references[page] == 1 for page in one.pages[one.released :])
        self.scheduler.finish(one)
        assert self.scheduler.pool.free == free + alone, "its pages are free at once"
        self.open.remove(one)

    def fail(self):
        """An error of a step: what is in flight is lost, and what pages hold."""
        self.scheduler.restart()
        self.holds.clear()
        for one in self.open:
            self.texts[one.number] = one.prompt + one.tokens

    def check(self):
        pool, used = self.scheduler.pool, [page for one in self.open for page in one.pages[one.released :]]
        assert 0 not in used
        assert pool._references == [used.count(page) for page in range(pool.pages)]
        assert pool.free + len(set(used)) == pool.capacity
        spare = [*pool._free, *pool._unused]
        assert sorted([*spare, *set(used)]) == list(range(1, pool.pages)), "each page is used or free, once"
        assert {page: digest for digest, page in pool._page_of.items()} == pool._digest_of
        assert not set(pool._free) & set(pool._digest_of)


prompts = st.tuples(st.sampled_from([0, 3, 8, 11, 20]), st.lists(st.integers(0, 1), min_size=1, max_size=6)).map(
    lambda drawn: [7] * drawn[0] + drawn[1]
)
events = st.one_of(
    st.tuples(st.just("submit"), prompts, st.integers(1, 12)),
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("fail")),
)


@settings(max_examples=150)
@example(
    events=[
        ("submit", [0], 1),
        ("submit", [7] * 11 + [0], 1),
        ("submit", [7] * 3 + [0] * 4, 10),
        ("submit", [7] * 11 + [0], 1),
    ],
    pages=7,
    max_batch=1,
    chunk_tokens=4,
    window=None,
)
@given(
    events=st.lists(events, max_size=40),
    pages=st.integers(7, 14),
    max_batch=st.integers(1, 4),
    chunk_tokens=st.integers(1, 40),
    window=st.sampled_from([None, 1, 4, 9, 18]),
)
def test_no_page_is_lost_or_misread_whatever_comes_and_goes(events, pages, max_batch, chunk_tokens, window):
    Device(pages, max_batch, chunk_tokens, window).play(events)


def finished(device, *sizes):
    """Tokens read for each prompt, one after the other; each runs to its end. A third element is its salt."""
    read = []
    for prompt, *rest in sizes:
        device.submit(prompt, *rest)
        [one] = device.open
        while device.open:
            device.step(collect=True)
        read.append(len(prompt) - one.hit_tokens)
    return read


def test_prompts_and_answers_are_found_and_a_token_is_always_read():
    device, prompt = Device(20, 4, 64), list(range(10, 18))
    assert finished(device, (prompt, 6), (prompt, 1), ([*prompt, 5], 1)) == [8, 4, 1]
    answered = device.texts[0]
    # Of 14 tokens the last is never cached: three pages are full.
    assert finished(device, ([*answered, 1, 1, 1], 1)) == [17 - 12]
    assert finished(device, ([9, *prompt[1:]], 1)) == [8], "a page counts only behind the same tokens"
    assert device.scheduler.hit_tokens == 4 + 8 + 12


def test_a_salt_shares_pages_only_with_itself():
    device, prompt = Device(30, 4, 64), [1] * 13
    asked = [(prompt, 1), (prompt, 1, "a"), (prompt, 1, "b"), (prompt, 1), (prompt, 1, "a"), ([*prompt, 2], 1, "b")]
    assert finished(device, *asked) == [13, 13, 13, 1, 1, 2]
    for salt in "ab":
        device.submit([3] * 9, 2, salt)
    device.submit([3] * 9, 2, "a")
    device.step(collect=False)
    device.step(collect=False)
    assert [one.hit_tokens for one in device.open] == [0, 0, 8], "also while pages are being filled"


def test_no_salt_stands_for_a_page():
    """One that has the bytes of a page: behind it another prompt's second page would be found."""
    device, tokens = Device(30, 4, 64), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    page = array("q", tokens[:PAGE]).tobytes().decode()
    assert finished(device, (tokens, 1), (tokens[PAGE:], 1, page), (tokens[PAGE:], 1)) == [9, 5, 5]


def test_a_prompt_that_is_to_be_read_whole_shares_nothing_and_can_be_shared():
    device = Device(20, 4, 64)
    finished(device, ([1] * 9, 1))
    device.submit([1] * 13, 3)
    device.open[-1].reads_all = True
    device.submit([1] * 13, 3)
    device.step(collect=False)
    device.step(collect=False)
    assert [one.hit_tokens for one in device.open] == [0, 12]


def test_a_prompt_waits_a_step_for_pages_that_another_fills_and_then_shares_them():
    device = Device(20, 4, 64)
    for prompt in ([3] * 9, [3] * 13, [4] * 9):
        device.submit(prompt, 4)
    device.step(collect=False)
    assert [one.hit_tokens for one in device.open] == [0, None, None], "in order"
    device.step(collect=False)
    first, second, third = device.open
    assert (second.hit_tokens, third.hit_tokens) == (8, 0) and second.pages[:2] == first.pages[:2]
    device.leave(first)
    device.step(collect=False)  # checks that what `second` reads is still there


def test_after_an_error_no_page_is_found():
    device = Device(20, 4, 64)
    device.submit([1] * 8, 3)
    device.step(collect=True)
    device.fail()
    device.leave(device.open[0])
    device.submit([1] * 9, 1)
    device.step(collect=False)
    assert device.open[-1].hit_tokens == 0


def test_a_request_waits_where_only_the_pages_that_it_shares_are_free():
    device = Device(4, 2, 64)
    finished(device, ([1] * 8, 1))
    device.submit([2] * 5, 4)
    device.step(collect=True)
    device.submit([1] * 13, 1)
    device.step(collect=True)
    waiting = device.open[1]
    assert waiting.slot is None and device.scheduler.pool.free == 2
    device.step(collect=True)
    assert device.open == [waiting]
    device.step(collect=False)
    assert waiting.hit_tokens == 8


def test_a_prompt_is_found_by_the_pages_of_its_window():
    """Of 32 tokens the last 8 lie in windows of 9 of those behind them: pages before those were freed first."""
    device, prompt = Device(8, 2, 64, window=9), list(range(32))
    device.submit(prompt, 2)
    while device.open:
        device.step(collect=True)
    pool = device.scheduler.pool
    pool.give_back(pool.take(6))
    assert not pool.find([digest_of(b"", prompt[:PAGE])]), "forgotten"
    device.submit([*prompt, 40, 41], 1)
    device.step(collect=False)
    [one] = device.open
    assert one.hit_tokens == 32 and one.pages[:6] == [0] * 6 and one.held == 3


def test_the_page_that_was_freed_first_is_reused_first():
    pool = PagePool(1 + 4, PAGE)
    first, second = pool.take(2), pool.take(1)
    for page in (*first, *second):
        pool.publish(page, bytes([page]))
    pool.give_back(second)
    pool.give_back(first)
    assert pool.free == 4
    rest = pool.take(2)
    assert rest == [4, second[0]], "a page that nothing is known of goes first"
    assert pool.find([bytes([page]) for page in first]) == first
    assert pool.take(1) == [first[1]], "the end of a sequence goes before its begin"
    assert pool.find([bytes([page]) for page in first]) == first[:1]


def test_digests_are_the_same_in_every_process():
    assert digest_of(b"", [1, 2]).hex().startswith("0c730b69905c5ef7")


PREFIX = "the same long beginning of them all, "
PROMPTS = [PREFIX + "one", PREFIX[:20], PREFIX + "one", PREFIX + "one and more"]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"max_batch": 1}),
        (1, {"pages": 1 + 6, "max_batch": 3, "chunk_tokens": 16}),
        (2, {"max_batch": 2}),
        pytest.param(2, {"mode": "ag_rs", "max_batch": 2, "fused": True}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_answers_are_those_without_it(byte_model, world_size, options):
    def main(team, **caching):
        engine = Engine(byte_model, team, **{"mode": "torch", "page_size": 16} | options | caching)
        found = [engine.generate(PROMPTS, max_tokens=tokens, temperature=1.0, seed=1) for tokens in (20, 3)]
        pool = engine.batch.scheduler.pool
        assert pool.free == pool.capacity
        return found, engine.batch.scheduler.hit_tokens, engine.stats.hit_tokens, engine.batch.scheduler.preemptions

    [(expected, none, _, preemptions), *_] = weft.simulate(lambda team: main(team, prefix_caching=False), world_size)
    assert none == 0 and (preemptions > 0) == ("pages" in options)
    for found, hits, of_last, _ in weft.simulate(main, world_size):
        assert found == expected
        assert hits > of_last > 0
