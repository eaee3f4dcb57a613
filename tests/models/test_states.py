"""States of gated delta nets in an engine: slots that are used again and moved, preemption, chunks, prompts beside streams."""

import pytest
import torch

import weft
from tests.against_transformers import DELTA_NETS, reference_greedy
from weft.engine import Engine, SamplingParams
from weft.engine.config import EngineConfig
from weft.models import Decoder
from weft.models.config import DecoderConfig

# Dense layers: an answer does not depend on ties of routers.
DENSE = {"family": "Qwen3Next", **DELTA_NETS, "mlp_only_layers": [0, 1, 2], "initializer_range": 0.2}
LENGTHS = (5, 11, 1, 23, 7, 16)


@pytest.fixture(scope="module")
def made(make_checkpoint):
    """(directory, prompts, the 12 tokens that transformers answers with)"""
    directory, reference = make_checkpoint(**DENSE)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(257, (1, length), generator=generator) for length in LENGTHS]
    answers = [reference_greedy(reference, prompt, 12)[0].tolist() for prompt in prompts]
    return directory, [prompt[0].tolist() for prompt in prompts], answers


def answers(team, directory, prompts, options):
    engine = Engine(directory, team, **{"mode": "torch"} | options)
    return [one.token_ids for one in engine.generate(prompts, max_tokens=12, ignore_eos=True)]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"max_batch": 2}),  # slots are used again
        (1, {"max_batch": 3, "chunk_tokens": 4}),  # chunks shorter than prompts, states handed from one to the next
        (1, {"max_batch": 6, "page_size": 16, "pages": 6, "max_seq_len": 48}),  # preemption: prompts are read once more
        (2, {"max_batch": 4, "chunk_tokens": 8, "mixed_chunk_tokens": 3}),
    ],
    ids=str,
)
def test_answers_are_those_of_transformers(made, world_size, options):
    directory, prompts, expected = made
    for found in weft.simulate(answers, world_size, args=(directory, prompts, options)):
        assert found == expected


@pytest.mark.parametrize(("world_size", "mode", "chunk"), [(2, "replicated", 13), (4, "sequence_parallel", 64)])
def test_a_spread_cache_beside_states(made, plain_ops, world_size, mode, chunk):
    """Over four ranks there are fewer KV heads than ranks."""
    directory, prompts, expected = made

    def main(team):
        options = {"context_parallel": True if world_size == 2 else None, "page_size": 16, "chunk_tokens": chunk}
        engine = Engine(directory, team, mode=mode, fused=False, **options)
        assert engine.cache_plan.context_parallel
        return [one.token_ids for one in engine.generate(prompts[3:5], max_tokens=4, ignore_eos=True)]

    for found in weft.simulate(main, world_size):
        assert found == [answer[:4] for answer in expected[3:5]]


def test_slots_move_with_their_states(made):
    """Streams end at different times, so that sequences move to lower slots, for a smaller bucket."""
    directory, prompts, expected = made

    def main(team):
        engine = Engine(directory, team, mode="torch", max_batch=6)
        moves, move = [], engine.batch.runner.move

        def counted(pairs):
            moves.extend(pairs)
            move(pairs)

        engine.batch.runner.move = counted
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, SamplingParams(max_tokens=2 + 2 * index, ignore_eos=True))
        tokens = {}
        while engine.has_work:
            for piece in engine.step():
                tokens.setdefault(piece.prompt, []).append(piece.token_id)
        return [tokens[index] for index in sorted(tokens)], len(moves)

    [(found, moves)] = weft.simulate(main, 1)
    assert moves > 0 and found == [answer[: 2 + 2 * index] for index, answer in enumerate(expected)]


def test_world_sizes_and_draft_models_that_do_not_fit_are_refused(made):
    def main(team):
        config = DecoderConfig.from_dict({**weft.models.Checkpoint(made[0]).config, "linear_num_key_heads": 1})
        with pytest.raises(ValueError, match="linear_num_key_heads=1 is not divisible by world_size=2"):
            Decoder(config, team, mode="torch")
        drafting = {"method": "draft_model", "model": str(made[0]), "num_speculative_tokens": 2}
        with pytest.raises(ValueError, match="has gated delta nets, whose states take no token twice"):
            Engine(made[0], team, mode="torch", speculative=drafting)
        with pytest.raises(ValueError, match="models with gated delta nets run in one stage"):
            Engine(made[0], team, mode="torch", pipeline_parallel=2)

    weft.simulate(main, 2)
    assert EngineConfig().prefix_caching


def test_more_sequences_than_states_are_refused(made):
    def main(team):
        model = Decoder.from_pretrained(made[0], team, mode="torch")
        step = model.decode_step(torch.tensor([3, 3]), torch.tensor([[1], [2]], dtype=torch.int32))
        with pytest.raises(ValueError, match="2 sequences of a step, and a cache with states of 1;.*slots=2"):
            model(torch.tensor([1, 2]), step, model.new_cache(3, 16, slots=1))

    weft.simulate(main, 1)
