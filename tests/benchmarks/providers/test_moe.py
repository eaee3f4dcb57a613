"""Baselines of ops of a mixture of experts: right answers on simulated ranks, with their own library; wrong ones show."""

import itertools
import sys
import types

import pytest
import torch

import weft
from tests.bench.ops.choosing import choose
from tests.bench.ops.test_moe_problem import MOE, problem_of
from tests.benchmarks.providers.loaded import loaded
from weft.bench.harness.provider import Unavailable
from weft.ops.case import error_bound

moe, over_ranks, packages = map(loaded, ("moe", "moe_over_ranks", "moe_packages"))


# Providers that are not here, with what they say.
ABSENT = {
    "torch.all_to_all_vdev_2d": "NVSHMEM",
    "deep_ep": "deep_ep is not installed; build it with benchmarks/packages.sh",
    "pplx": "pplx_kernels is not installed; build it with benchmarks/packages.sh",
    "liger": "liger_kernel is not installed; pip install liger-kernel",
}


class Library:
    """torch.distributed, whose group is a team."""

    @staticmethod
    def all_gather_into_tensor(out, x, group):
        out.copy_(torch.cat(group.team.exchange(x)))

    @staticmethod
    def all_reduce(x, group):
        x.copy_(group.team.library.all_reduce(x))

    @staticmethod
    def reduce_scatter_tensor(out, x, group):
        out.copy_(group.team.library.reduce_scatter(x))

    @staticmethod
    def all_to_all_single(out, x, received=None, sent=None, group=None):
        team = group.team
        sent = sent or [len(x) // team.size] * team.size
        parts = [parts[team.rank] for parts in team.exchange(list(x.split(sent)))]
        assert received in (None, list(map(len, parts)))
        out.copy_(torch.cat(parts))


@pytest.fixture
def libraries(monkeypatch):
    monkeypatch.setattr(over_ranks, "dist", Library)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, options=None: function)


@pytest.mark.parametrize("word", ["qwen3-30b-a3b", "qwen3-30b-a3b/zipf", "olmoe-1b-7b/recorded"])
@pytest.mark.parametrize("op", MOE)
def test_every_baseline_gives_the_answer(op, word, libraries):
    others = [provider for provider in choose(op, []) if provider.role != "weft"]
    ran = []

    def main(team):
        team.group = types.SimpleNamespace(team=team)
        made = problem_of(op, word, team)
        for provider in others:
            if provider.name in ABSENT:
                with pytest.raises(Unavailable, match=ABSENT[provider.name]):
                    provider.make(made)
                continue
            prepared = provider.make(made)
            for _ in range(2):
                if prepared.prepare is not None:
                    prepared.prepare(0)
                out = prepared.run(0)
                assert made.verdict(prepared, out).wrong == "", provider.name
            changed = out[-1] if isinstance(out, tuple) else out
            changed += 1
            assert made.verdict(prepared, out).wrong != "", provider.name
            ran.append(provider.name)

    weft.simulate(main, 2)
    assert ran and len(ran) == 2 * len([one for one in others if one.name not in ABSENT])


class DeepEP:
    """Calls of deep_ep.Buffer that moe_packages.py makes, over simulated ranks."""

    def __init__(self, group, nvl_bytes, rdma_bytes, explicitly_destroy):
        self.team, self.destroyed = group.team, False

    def get_dispatch_layout(self, ids, experts):
        assert ids.dtype == torch.int64
        of_rank = ids // (experts // self.team.size)
        is_in_rank = torch.stack([(of_rank == rank).any(-1) for rank in range(self.team.size)], 1)
        return is_in_rank.sum(0).int(), None, torch.bincount(ids.flatten(), minlength=experts).int(), is_in_rank, None

    def dispatch(
        self, x, topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, num_worst_tokens
    ):
        assert topk_weights.dtype == torch.float32
        tensors = x if isinstance(x, tuple) else (x,)
        given = [self.team.exchange((one, is_token_in_rank)) for one in tensors]
        came = [torch.cat([rows[there[:, self.team.rank]] for rows, there in ranks]) for ranks in given]
        if num_worst_tokens:  # what follows the rows is not defined
            came = [torch.cat([one, torch.ones_like(one[:1]).expand(num_worst_tokens - len(one), -1)]) for one in came]
        return tuple(came) if isinstance(x, tuple) else came[0], None, None, None, given[0], None

    def combine(self, x, handle):
        lengths = [int(there[:, self.team.rank].sum()) for _, there in handle]
        back = [parts[self.team.rank] for parts in self.team.exchange(list(x.split(lengths)))]
        total = torch.zeros(handle[self.team.rank][0].shape)
        for rank, rows in enumerate(back):
            total[handle[self.team.rank][1][:, rank]] += rows.float()
        return total.to(x.dtype), None, None

    def destroy(self):
        assert not self.destroyed
        self.destroyed = True


class AllToAll:
    """Calls of pplx_kernels.AllToAll that moe_packages.py makes, over simulated ranks; slots in descending order of tokens."""

    def __init__(self, team):
        self.team, self.sent = team, None

    def dispatch(self, out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m):
        assert self.sent is None, "a combine has to follow each dispatch"
        assert (dp_x_scale is None) == (out_expert_x_scale is None) == (dp_x.dtype != torch.float8_e4m3fn)
        self.sent, held = indices, len(out_expert_x)
        ids = torch.cat(self.team.exchange(indices.long()))
        chosen = [(ids == self.team.rank * held + local).any(-1).nonzero()[:, 0].flip(0) for local in range(held)]
        self.tokens = chosen
        out_expert_num_tokens.copy_(torch.tensor([len(tokens) for tokens in chosen]))
        scales = [(dp_x_scale, out_expert_x_scale)] if dp_x_scale is not None else []
        for given, out in [(dp_x, out_expert_x), *scales]:
            x = torch.cat(self.team.exchange(given))
            for local, tokens in enumerate(chosen):
                out[local, : len(tokens)] = x[tokens]

    def combine(self, out_tokens, indices, weights, expert_y, bound_m):
        assert indices is self.sent and weights.dtype == torch.float32
        self.sent, (T, k), held = None, indices.shape, len(expert_y)
        rows = [(tokens, expert_y[local, : len(tokens)].float()) for local, tokens in enumerate(self.tokens)]
        by_expert = [one for rank in self.team.exchange(rows) for one in rank]
        assert len(by_expert) == held * self.team.size
        total = torch.zeros((T, expert_y.shape[2]))
        for token, choice in itertools.product(range(T), range(k)):
            tokens, found = by_expert[int(indices[token, choice])]
            total[token] += weights[token, choice] * found[tokens == token + self.team.rank * T][0]
        out_tokens.copy_(total)

    def destroy(self):
        self.team = None


class LigerKernels:
    """Kernels of liger_kernel.ops.fused_moe_kernels that moe_packages.py launches, tile by tile."""

    def __init__(self, gated):
        self.gated = gated

    def __getitem__(self, grid):
        return lambda *tensors, **given: self.launch(grid({"BLOCK_N": 64}), *tensors, **given)

    def launch(self, grid, x, weight, *tensors, H_dim, I_dim, BLOCK_M, **strides):
        tokens = [] if not self.gated else [tensors[0].long()]
        starts, rows, experts, *out = tensors[len(tokens) :]
        names = ("x_T", "x_H", "w_E", "w_N", "w_K", "pre_TK", "pre_N", "post_TK", "post_N")
        read, sizes = (x, weight, *out), (H_dim, I_dim)
        if not self.gated:
            names, sizes = ("post_TK", "post_I", "w_E", "w_H", "w_I", "Y_TK", "Y_H"), (I_dim, H_dim)
        wanted = [stride for tensor in read for stride in tensor.stride()]
        assert [strides[f"stride_{name}"] for name in names] == wanted
        assert (x.shape[1], out[-1].shape[1]) == sizes and grid == (len(rows), -(-sizes[1] // 64))
        for row, expert in zip(rows.tolist(), experts.tolist(), strict=True):
            pairs = slice(row, min(row + BLOCK_M, int(starts[expert + 1])))
            assert starts[expert] <= row < pairs.stop
            found = x[tokens[0][pairs] if tokens else pairs].float() @ weight[expert].float().T
            if self.gated:
                out[0][pairs] = found.to(x.dtype)
                found = moe.silu_mul(found)
            out[-1][pairs] = found.to(x.dtype)


@pytest.mark.parametrize("op", moe.GROUPED)
@pytest.mark.parametrize("word", ["qwen3-30b-a3b", "64,2,8,4,48,72"])
def test_liger_s_kernels_are_launched_as_they_want(op, word, libraries, monkeypatch):
    """More than a tile of pairs for some experts, and more than a block of columns."""
    kernels = types.SimpleNamespace(
        _fused_up_proj_swiglu_kernel=LigerKernels(True), _fused_down_proj_kernel=LigerKernels(False)
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe_kernels", kernels)
    monkeypatch.setattr(packages, "LIGER_TILE", 8)
    [provider] = [one for one in choose(op, []) if one.name == "liger"]

    def main(team):
        team.group = types.SimpleNamespace(team=team)
        made = problem_of(op, word, team)
        prepared = provider.make(made)
        out = prepared.run(0)
        assert made.verdict(prepared, out).wrong == ""
        out[-1] += 1
        assert made.verdict(prepared, out).wrong != ""

    weft.simulate(main, 2)


def use_packages(monkeypatch):
    """Install the two stand-ins. Returns the teams by rank, to be filled in, of which they are."""
    teams = {}
    made_by = types.SimpleNamespace(intranode=lambda rank, **sizes: AllToAll(teams[rank]))
    monkeypatch.setitem(sys.modules, "deep_ep", types.SimpleNamespace(Buffer=DeepEP))
    monkeypatch.setattr(packages, "with_cpu", lambda group: group)
    monkeypatch.setattr(packages, "pplx_module", lambda: types.SimpleNamespace(AllToAll=made_by))
    return teams


@pytest.mark.parametrize("name", ["deep_ep", "pplx"])
def test_packages_that_are_installed_are_called_as_they_want(name, libraries, monkeypatch):
    teams = use_packages(monkeypatch)

    def main(team):
        teams[team.rank] = team
        team.group = types.SimpleNamespace(team=team, group_name="0")
        for op in ("moe-dispatch", "moe-dispatch+fp8", "moe-combine"):
            [provider] = [one for one in choose(op, []) if one.name == name]
            made = problem_of(op, "qwen3-30b-a3b", team)
            prepared = provider.make(made)
            prepared.run(0)  # as the first call of a bench, without prepare
            for _ in range(2):
                prepared.prepare(0)
                out = prepared.run(0)
                assert made.verdict(prepared, out).wrong == "", op
            changed = out[-1] if isinstance(out, tuple) else out
            changed += 1
            assert made.verdict(prepared, out).wrong != "", op
            prepared.release()

    weft.simulate(main, 2)


def test_pplx_runs_no_two_dispatches_or_combines_in_a_row(libraries, monkeypatch):
    teams = use_packages(monkeypatch)

    def main(team):
        teams[team.rank] = team
        team.group = types.SimpleNamespace(team=team, group_name="0")
        for op, message in (("moe-dispatch", "combine has to follow"), ("moe-combine", "dispatch has to precede")):
            [provider] = [one for one in choose(op, []) if one.name == "pplx"]
            prepared = provider.make(problem_of(op, "qwen3-30b-a3b", team))
            prepared.run(0)
            with pytest.raises(Unavailable, match=message):
                prepared.run(0)
            prepared.prepare(0)
            prepared.run(0)

    weft.simulate(main, 2)


def test_results_between_kernels_are_allowed_their_roundings():
    """Products of two normal numbers have long tails, where rounding gate, up and silu shows; a seventh bit lost does too."""
    exact = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    gate, up = exact.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    error = (moe.silu_mul(exact.bfloat16()).float() - expected).abs()
    bounds = [error_bound(expected, torch.bfloat16, 1, partials=1, roundings=roundings) for roundings in (1, 4)]
    assert (error > bounds[0]).any() and (error <= bounds[1]).all()
    assert ((expected * (1 + 2**-5) - expected).abs() > bounds[1]).any()


def test_a_unit_in_the_last_place_of_a_library_counts_as_right():
    """Of bytes of e4m3 and of scales; two units, another sign, and ids that differ do not."""
    for expected, right, wrong in (
        (torch.tensor([0x38, 0xB8, 0x7E], dtype=torch.uint8), [0x39, 0xB7, 0x7D], [0x3A, 0x38, 0xFE]),
        (torch.tensor([1.0, 0.1]), [1.0 + 2**-23, 0.1], [1.0 + 2**-22, -0.1]),
        (torch.tensor([3, 4], dtype=torch.int32), [3, 4], [4, 5]),
    ):
        near, far = (torch.tensor(values, dtype=expected.dtype) for values in (right, wrong))
        assert over_ranks.within_a_unit(near, expected).equal(expected)
        assert (over_ranks.within_a_unit(far, expected) != expected).all()
