"""Decode steps in flight over stages have the tokens of one rank, whatever enters, ends or waits meanwhile."""

import pytest

import weft
from weft.engine import Engine, SamplingParams

STAGED = {"mode": "replicated", "page_size": 16, "microbatch_tokens": 1}
MORE = {"max_tokens": 7, "ignore_eos": True}
ASKED = [
    ([5, 6, 7], SamplingParams(**MORE)),
    (list(range(1, 20)), SamplingParams(temperature=1.0, seed=1, top_p=0.9, logprobs=1, **MORE)),
    ([9], SamplingParams(temperature=1.0, seed=2, repetition_penalty=1.3, presence_penalty=0.4, **MORE)),
    ([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True)),
    # While those before are in flight: this one enters, the next one too, and is cancelled.
    ([30, 31], SamplingParams(temperature=0.7, seed=4, top_k=20, **MORE)),
    ([8] * 18, SamplingParams(max_tokens=30, ignore_eos=True)),
]


def answers(team, directory, options):
    """Token ids of ASKED, turns of this rank, and sequences preempted."""
    engine = Engine(directory, team, **STAGED | options)
    runner, turns = engine.batch.runner, []
    flight, turn = runner._flight, runner._flight._turn
    flight._turn = lambda one, kind: (turns.append(one), turn(one, kind))
    numbers = [engine.submit(*one) for one in ASKED[:4]]
    tokens, steps = {}, 0
    while engine.has_work:
        steps += 1
        if steps in (4, 6):
            numbers.append(engine.submit(*ASKED[len(numbers)]))
        for piece in engine.step():
            tokens.setdefault(piece.prompt, []).append(piece.token_id)
        if steps == 10:
            engine.cancel(numbers[-1])
    assert not runner.in_flight
    # A stream that is closed early, and beside it two answers that need the pages of three.
    stream = engine.stream([prompt for prompt, _ in ASKED[:2]], **MORE)
    for _ in range(5):
        next(stream)
    found = [one.token_ids for one in engine.generate([[1] * 30, [2] * 30], max_tokens=12, ignore_eos=True)]
    stream.close()
    assert not runner.in_flight
    return [tokens[number] for number in numbers], found, turns, engine.load.preemptions


def restarted(team, directory, fails):
    """Token ids, where no slot can be told its changes in the fifth step."""
    engine = Engine(directory, team, pipeline_parallel=2, **STAGED)
    assign, calls, found = engine.batch._assign_slots, [], {}

    def fail(decoding, arrived):
        calls.append(engine.batch.runner.in_flight)
        if len(calls) == 5 and fails:
            assert calls[-1]
            raise MemoryError
        return assign(decoding, arrived)

    engine.batch._assign_slots = fail
    for one in ASKED[:4]:
        engine.submit(*one)
    while engine.has_work:
        try:
            for piece in engine.step():
                found.setdefault(piece.prompt, []).append(piece.token_id)
        except MemoryError:
            assert len(calls) == 5 and not engine.batch.runner.in_flight
    return found


def test_after_an_error_no_token_of_the_step_in_flight_is_lost_or_doubled(make_checkpoint, plain_ops):
    directory, _ = make_checkpoint(num_hidden_layers=3)
    expected = weft.simulate(restarted, 2, node_size=1, args=(directory, False))
    assert weft.simulate(restarted, 2, node_size=1, args=(directory, True)) == expected


@pytest.mark.parametrize(
    ("ranks", "node_size", "stages", "options"),
    [
        (2, 1, 2, {}),
        (4, 2, 2, {}),
        (3, 1, 3, {"max_batch": 3}),
        (2, 2, 2, {"pages": 6, "prefix_caching": False}),
    ],
)
def test_groups_in_flight_get_the_tokens_of_one_rank(make_checkpoint, plain_ops, ranks, node_size, stages, options):
    directory, _ = make_checkpoint(num_hidden_layers=3)
    [(alone, later, none, _)] = weft.simulate(answers, 1, args=(directory, {}))
    assert not none
    options = options | {"pipeline_parallel": stages}
    for rank, given in enumerate(weft.simulate(answers, ranks, node_size=node_size, args=(directory, options))):
        found, same, turns, preempted = given
        assert found[:-1] == alone[:-1] and same == later
        few = min(len(found[-1]), len(alone[-1]))
        assert few and found[-1][:few] == alone[-1][:few]
        assert bool(preempted) == ("pages" in options)
        # Steps that follow each other: the tokens of the last group come behind a turn of the next step.
        last = rank // (ranks // stages) == stages - 1
        assert any(turn.arriving == stages - 1 for turn in turns) != last and len(turns) % stages == 0
