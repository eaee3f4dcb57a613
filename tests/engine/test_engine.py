"""Engine: text in, text out, the same on every rank, over any number of ranks, alone or in a batch."""

import shutil

import pytest

import weft
from weft.engine import Engine
from weft.engine.text import load_tokenizer
from weft.errors import CheckpointError

PROMPTS = ["a prompt", "x", "another, longer prompt"]


def generate(directory, prompts, world_size=1, *, mode="torch", eos=(), **options):
    """Every rank's completions."""

    def main(team):
        engine = Engine(directory, team, mode=mode)
        engine.eos_token_ids |= frozenset(eos)
        return engine.generate(prompts, **options)

    return weft.simulate(main, world_size)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}], ids=["greedy", "sampled"])
def test_tokens_are_the_same_on_every_rank_and_for_every_world_size(byte_model, sampling):
    [alone] = generate(byte_model, PROMPTS, 1, max_new_tokens=24, **sampling)
    for world_size in (2, 4):
        for completions in generate(byte_model, PROMPTS, world_size, max_new_tokens=24, **sampling):
            assert completions == alone
    assert all(len(found.token_ids) == 24 or found.finish_reason == "eos" for found in alone)
    assert len(set(sum((found.token_ids for found in alone), []))) > 20  # not one token again and again


def test_prompts_in_a_batch_are_answered_as_alone(byte_model):
    [together] = generate(byte_model, PROMPTS, max_new_tokens=16)
    assert together == [generate(byte_model, prompt, max_new_tokens=16)[0][0] for prompt in PROMPTS]


def test_the_seed_decides_what_is_drawn(byte_model):
    drawn = [
        generate(byte_model, "x", temperature=1.0, seed=seed, max_new_tokens=16)[0][0].token_ids for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_end_of_sequence_token_ends_one_answer_and_not_the_others(byte_model):
    [[free, other]] = generate(byte_model, PROMPTS[:2], max_new_tokens=20)
    eos = next(token for token in free.token_ids[3:] if token not in other.token_ids)
    end = free.token_ids.index(eos)
    for world_size in (1, 2):
        for ended, unchanged in generate(byte_model, PROMPTS[:2], world_size, max_new_tokens=20, eos=[eos]):
            assert ended.token_ids == free.token_ids[: end + 1]
            assert ended.finish_reason == "eos"
            assert free.text.startswith(ended.text.rstrip("\ufffd"))
            assert unchanged == other


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(byte_model):
    [[free]] = generate(byte_model, PROMPTS[0], max_new_tokens=20)
    at = len(free.text) // 2
    stop = free.text[at : at + 2]
    for given in (stop, [stop], ("never there", stop)):
        [[stopped]] = generate(byte_model, PROMPTS[0], max_new_tokens=20, stop=given)
        assert stopped.finish_reason == "stop"
        assert stopped.text == free.text[: free.text.index(stop)]
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        assert len(stopped.token_ids) < 20


def test_streamed_pieces_are_the_completions(byte_model):
    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        pieces = list(engine.stream(PROMPTS, max_new_tokens=12))
        return pieces, engine.generate(PROMPTS, max_new_tokens=12), engine.stats

    for pieces, completions, stats in weft.simulate(main, 2):
        assert [piece.prompt for piece in pieces] == [0, 1, 2] * 12
        for index, completion in enumerate(completions):
            own = [piece for piece in pieces if piece.prompt == index]
            assert "".join(piece.text for piece in own) == completion.text
            assert [piece.token_id for piece in own] == completion.token_ids
            assert [piece.finish_reason for piece in own] == [None] * 11 + ["length"]
        assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, PROMPTS)), 36)
        assert stats.load_seconds > 0 and stats.time_to_first_token > 0 and stats.tokens_per_second > 0


def test_an_engine_answers_again_as_a_new_one_would(byte_model):
    calls = [(PROMPTS, 12), ([PROMPTS[2]] * 3, 30), (["y"], 3), (PROMPTS, 12)]

    def main(team):
        engine = Engine(byte_model, team, mode="torch")
        return [engine.generate(prompts, max_new_tokens=steps) for prompts, steps in calls]

    [found] = weft.simulate(main, 1)
    assert found == [generate(byte_model, prompts, max_new_tokens=steps)[0] for prompts, steps in calls]


def test_an_answer_ends_where_the_model_does(byte_model):
    """max_position_embeddings is 96; the shorter prompt goes on beside one that has reached it."""
    [[short, long]] = generate(byte_model, ["x", "y" * 90], max_new_tokens=20)
    assert (len(short.token_ids), len(long.token_ids), long.finish_reason) == (20, 6, "length")
    assert short == generate(byte_model, "x", max_new_tokens=20)[0][0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", r"prompts\[0\]='' is empty"),
        (["x", ""], r"prompts\[1\]='' is empty"),
        ([], "prompts is empty"),
        ([3], r"prompts\[0\]=3 is not a string"),
        ("y" * 96, r"prompts\[0\] has 96 tokens .* max_seq_len=96; shorten it to 95 tokens"),
    ],
)
def test_prompts_without_an_answer_are_refused(byte_model, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(byte_model, prompts, 2)


def test_max_seq_len_bounds_prompt_and_answer(byte_model):
    def main(team, max_seq_len):
        return Engine(byte_model, team, mode="torch", max_seq_len=max_seq_len).generate("abc", max_new_tokens=50)

    [[completion]] = weft.simulate(main, 1, args=(10,))
    assert len(completion.token_ids) == 7
    with pytest.raises(ValueError, match="max_seq_len=97 is not in 2 .. max_position_embeddings=96"):
        weft.simulate(main, 1, args=(97,))


def test_ranks_that_ask_for_different_things_are_told_so(byte_model):
    def main(team):
        with pytest.raises(ValueError, match="rank 1 asked for .*rank 0 for .*all ranks must pass the same"):
            Engine(byte_model, team, mode="torch").stream("x", seed=team.rank)

    weft.simulate(main, 2)


def test_a_tokenizer_larger_than_the_model_is_refused(byte_model, tmp_path):
    copied = shutil.copytree(byte_model, tmp_path / "copy")
    tokenizer = load_tokenizer(copied)
    tokenizer.add_tokens(["one too many"])
    tokenizer.save(str(copied / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="tokenizer.json has 258 tokens, but config.json says vocab_size=257"):
        generate(copied, "x")


@pytest.mark.parametrize("mode", ["torch", "ag_rs", "gemm_ar"])
def test_the_built_in_model_adds_in_every_mode(mode):
    for [completion] in generate(None, "123+456=", 2, mode=mode, max_new_tokens=8):
        assert (completion.text, completion.finish_reason) == ("579", "eos")
