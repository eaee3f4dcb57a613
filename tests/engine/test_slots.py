"""Batch slots on the device are what was sent, in one copy of no more words than have changed."""

import random
from types import SimpleNamespace

import pytest
import torch

from weft.engine import slots as slots_module
from weft.engine.params import SamplingParams
from weft.engine.slots import SAMPLING, Slots, SlotState


@pytest.fixture
def copies(monkeypatch):
    """Bytes of each copy to the device."""
    found = []
    monkeypatch.setattr(slots_module, "upload", lambda x, device: found.append(x.nbytes) or x)
    return found


def drawn_state(draw, max_pages):
    return SlotState(
        position=draw.randrange(1 << 40),
        pages=[draw.randrange(1, 1 << 31) for _ in range(draw.randrange(max_pages))],
        last=draw.randrange(1 << 40),
        adapter=draw.randrange(-1, 64),
        params=SamplingParams(
            temperature=draw.choice([0.0, 0.7]),
            top_p=draw.random() or 1.0,
            top_k=draw.randrange(1 << 31),
            min_p=draw.random(),
            seed=draw.randrange(1 << 63),
        ),
    )


@pytest.mark.parametrize(("max_batch", "max_pages"), [(1, 1), (5, 3), (7, 40)])
def test_any_changes_are_one_copy_and_leave_other_slots_alone(copies, max_batch, max_pages):
    draw = random.Random(max_pages)
    slots = Slots(max_batch, max_pages, torch.device("cpu"))
    expected = SimpleNamespace(
        positions=[-1] * max_batch,
        last=[0] * max_batch,
        adapter=[-1] * max_batch,
        table=[[0] * max_pages for _ in range(max_batch)],
        **{name: [1.0 if name == "top_p" else 0] * max_batch for name in SAMPLING},
    )
    occupied = {}
    for _ in range(60):
        changes, pages = {}, []
        for slot in draw.sample(range(max_batch), draw.randrange(max_batch + 1)):
            if draw.random() < 0.3 and slot in occupied and len(occupied[slot]) < max_pages:
                pages.append((slot, len(occupied[slot]), draw.randrange(1, 1 << 31)))
                occupied[slot].append(pages[-1][2])
                expected.table[slot][pages[-1][1]] = pages[-1][2]
            elif draw.random() < 0.5:
                changes[slot] = state = drawn_state(draw, max_pages)
                occupied[slot] = list(state.pages)
                expected.positions[slot], expected.last[slot] = state.position, state.last
                expected.adapter[slot] = state.adapter
                expected.table[slot] = state.pages + [0] * (max_pages - len(state.pages))
                for name in SAMPLING:
                    getattr(expected, name)[slot] = getattr(state.params, name)
            else:
                changes[slot] = None
                occupied.pop(slot, None)
                expected.positions[slot] = -1
        slots.send(changes, pages)
        filled = sum(state is not None for state in changes.values())
        words = filled * (12 + max_pages) + (len(changes) - filled) * 2 + len(pages)
        assert copies == ([12 * words] if words else [])
        copies.clear()
        assert slots.occupied == set(occupied)
        for name, values in vars(expected).items():
            found = getattr(slots, name)
            assert torch.equal(found, torch.tensor(values, dtype=found.dtype)), name
        # A decode step advances them on the device.
        slots.positions.add_(slots.positions >= 0)
        expected.positions = [at + (at >= 0) for at in expected.positions]


def test_forgotten_slots_are_emptied_unless_they_are_filled_again(copies):
    slots = Slots(4, 2, torch.device("cpu"))
    state = SlotState(position=5, pages=[3], params=SamplingParams())
    slots.send({1: state, 3: state})
    slots.forget()
    assert slots.positions.tolist() == [-1, 5, -1, 5] and not slots.occupied
    slots.send({2: state})
    assert slots.positions.tolist() == [-1, -1, 5, -1] and slots.occupied == {2}
    slots.send({})
    assert len(copies) == 2


def test_fields_begin_where_kernels_expect_pointers():
    slots = Slots(3, 5, torch.device("cpu"))
    begin = slots.positions.data_ptr()
    assert all((getattr(slots, name).data_ptr() - begin) % 16 == 0 for name in ("table", *SAMPLING))
    assert all(getattr(slots, name).is_contiguous() for name in ("positions", "table", *SAMPLING))
