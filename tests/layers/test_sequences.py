"""Layers of [batch, length, hidden] without a paged cache: against the whole modules, and trained."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from weft.layers import TPMLP, Sequences, TPAttention, plan_layer, rotary_angles
from weft.parallel import plain
from weft.parallel.tensors import AttentionWeights

MODES = ("reference", "sequence_parallel", "replicated")
HIDDEN, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 8
BATCH, LENGTH = 2, 8
ANGLES = rotary_angles(LENGTH, HEAD_DIM, 50.0, torch.device("cpu"))[None]
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


class Alone:
    """The sequences on one rank."""

    shards, batch, length, tokens, angles, attend = 1, BATCH, LENGTH, BATCH * LENGTH, ANGLES, None


class Whole(nn.Module):
    """An attention and an MLP on one rank, their weights under the names that the layers' shards have."""

    def __init__(self, bias, window, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.window = window
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        self.attention = nn.ModuleDict({name: nn.Linear(HIDDEN, N, bias=bias) for name, N in rows.items()})
        self.attention["o_proj"] = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.attention.update({name: nn.RMSNorm(HEAD_DIM, eps=1e-6) for name in ("q_norm", "k_norm")})
        self.mlp = nn.ModuleDict({name: nn.Linear(HIDDEN, FEATURES, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.to(dtype)

    def forward(self, x):
        parts, rows = self.attention, x.flatten(0, 1)
        qkv = torch.cat([parts[name](rows) for name in ("q_proj", "k_proj", "v_proj")], dim=1)
        norms = parts["q_norm"].weight, parts["k_norm"].weight
        w = AttentionWeights(None, None, *norms, 1e-6, HEADS, KV_HEADS, HEAD_DIM, None, self.window)
        attended = plain.attend_to_sequences(qkv, w, Alone)
        x = x + parts["o_proj"](attended).view_as(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


def sequences(team, mode):
    plan = plan_layer(BATCH * LENGTH, mode=mode, team=team, fused=False)
    return Sequences(plan=plan, batch=BATCH, length=LENGTH, angles=ANGLES)


def layers_of(whole, team, mode, bias, window):
    """The same over ranks."""
    dtype = whole.mlp["down_proj"].weight.dtype
    options = {"rms_norm_eps": 1e-6, "bias": bias, "window": window, "team": team, "mode": mode, "dtype": dtype}
    attention = TPAttention(**SIZES, **options)
    mlp = TPMLP(hidden_size=HIDDEN, intermediate_size=FEATURES, team=team, mode=mode, dtype=dtype)
    for layer, parts in ((attention, whole.attention), (mlp, whole.mlp)):
        tensors = parts.state_dict()
        for name, shard in layer.shards().items():
            shard.copy_from(tensors[name])
    return attention, mlp


def mine(x, team, mode):
    """This rank's part of x [batch, length, hidden]."""
    return x.chunk(team.size, dim=1)[team.rank] if mode == "sequence_parallel" else x


def run(attention, mlp, x, step):
    x = x + attention(x, step)
    return x + mlp(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("world_size", "bias", "window"),
    [
        (2, True, 3),
        (4, False, None),
        *(pytest.param(w, b, n, marks=pytest.mark.sweep) for w in (1, 2, 4) for b in (True, False) for n in (3, None)),
    ],
)
def test_layers_of_sequences_are_the_whole_layers(mode, world_size, bias, window):
    whole, x = Whole(bias, window).requires_grad_(False), torch.randn(BATCH, LENGTH, HIDDEN)

    def main(team):
        layers = layers_of(whole, team, mode, bias, window)
        return run(*layers, mine(x, team, mode), sequences(team, mode))

    found = weft.simulate(main, world_size)
    found = torch.cat(found, dim=1) if mode == "sequence_parallel" else found[0]
    torch.testing.assert_close(found, whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [
        pytest.param("sequence_parallel", 2, marks=pytest.mark.sweep),
        ("replicated", 4),
        *(pytest.param(mode, w, marks=pytest.mark.sweep) for mode in MODES[1:] for w in (1, 4)),
    ],
)
def test_two_steps_of_sgd_are_those_of_the_whole_layers(mode, world_size):
    """W = 4 over two KV heads: neighbours share one, and stay equal."""
    bias, window = True, None
    whole, x = Whole(bias, window), torch.randn(BATCH, LENGTH, HIDDEN)
    target = torch.randn(2, BATCH, LENGTH, HIDDEN)

    def main(team):
        attention, mlp = layers_of(whole, team, mode, bias, window)
        parameters = [*attention.requires_grad_().parameters(), *mlp.requires_grad_().parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for wanted in target:
            y = run(attention, mlp, mine(x, team, mode), sequences(team, mode))
            loss = (y - mine(wanted, team, mode)).square().sum() / 100
            (loss / (1 if mode == "sequence_parallel" else team.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {**attention.shards(), **mlp.shards()}

    by_rank = weft.simulate(main, world_size)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in whole.named_parameters()}
    for wanted in target:
        ((whole(x) - wanted).square().sum() / 100).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value for parts in (whole.attention, whole.mlp) for name, value in parts.named_parameters()}
    for shards in by_rank:
        assert shards.keys() == expected.keys()
        for name, shard in shards.items():
            part = torch.empty_like(shard.target)
            weft.parallel.sharding.Shard(target=part, shape=shard.shape, dim=shard.dim, start=shard.start).copy_from(
                expected[name].detach()
            )
            torch.testing.assert_close(shard.target, part, rtol=1e-5, atol=2e-6)
    assert all(not torch.equal(value, before[name]) for name, value in whole.named_parameters())


@pytest.mark.parametrize("mode", ["sequence_parallel", pytest.param("replicated", marks=pytest.mark.sweep)])
def test_gradients_of_layers_are_slopes_of_the_loss(mode):
    """Central differences along one direction of all ranks' inputs and weights, in fp32; the MLP is a checkpoint."""
    whole, x = Whole(True, 3), torch.randn(BATCH, LENGTH, HIDDEN)
    step_size = 5e-4

    def main(team):
        attention, mlp = layers_of(whole, team, mode, True, 3)
        attention.requires_grad_(), mlp.requires_grad_()
        leaves = [mine(x, team, mode).clone().requires_grad_(), attention.o_proj.weight, *mlp.parameters()]
        generator = torch.Generator().manual_seed(team.rank)
        ways = [torch.randn(leaf.shape, generator=generator) for leaf in leaves]
        weights = torch.randn(leaves[0].shape, generator=generator)

        def loss():
            y = leaves[0] + attention(leaves[0], sequences(team, mode))
            return (checkpoint(mlp, y, use_reentrant=False).double() * weights).sum()

        loss().backward()
        slope = sum((leaf.grad.double() * way).sum().item() for leaf, way in zip(leaves, ways, strict=True))
        found = []
        with torch.no_grad():
            for sign in (1, -2):
                for leaf, way in zip(leaves, ways, strict=True):
                    leaf += sign * step_size * way
                found.append(loss().item())
        return slope, (found[0] - found[1]) / (2 * step_size)

    slope, difference = (sum(values) for values in zip(*weft.simulate(main, 2), strict=True))
    # Of third derivatives times step_size**2, and fp32 rounding over step_size.
    assert abs(slope - difference) <= 2e-3 * abs(slope), (slope, difference)
