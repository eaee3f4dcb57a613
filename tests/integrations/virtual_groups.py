"""torch.distributed, DTensor and autograd on virtual ranks: every rank of a simulation is a rank of a process group."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.runtime.team import team as team_module


class _Meeting:
    """A collective of torch's groups of threads; its ranks meet in the simulation, whose scheduler must see them wait."""

    def __init__(self, collective, group):
        self.collective = collective

    def join(self, rank, data):
        meet = weft.Team.of()._platform.meet
        by_rank = meet("torch collective", data)
        if rank == 0:
            self.collective.work(by_rank)
        meet("end of a torch collective", None)
        return _threaded().ret_work(data)


def _threaded():
    from torch.testing._internal.distributed import multi_threaded_pg

    return multi_threaded_pg


@pytest.fixture
def simulate_mesh(monkeypatch):
    """simulate(main, world_size) of a main(mesh, team) that uses torch.distributed; Team.of(mesh) is ``team``."""
    threaded = _threaded()
    monkeypatch.setattr(threaded.ProcessLocalGroup, "_start_coll", staticmethod(_Meeting))
    monkeypatch.setattr(threaded.ProcessLocalGroup, "_end_coll", staticmethod(lambda *_: None))
    monkeypatch.setattr(threaded, "_store_based_barrier", lambda *_: None)
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it; groups of threads have none
        monkeypatch.setattr(threaded.ThreadLocalWorld, "comms", property(lambda world: []), raising=False)
    monkeypatch.setattr(team_module, "_refuse_group", lambda group: None)

    def simulate(main, world_size=2, **options):
        store = dist.HashStore()

        def of_rank(team):
            dist.init_process_group("threaded", rank=team.rank, world_size=team.size, store=store)
            try:
                return main(init_device_mesh("cpu", (team.size,), mesh_dim_names=("tp",))["tp"], team)
            finally:
                dist.destroy_process_group()

        with _ranks_are_threads(threaded):
            return weft.simulate(of_rank, world_size, **options)

    return simulate


@contextmanager
def _ranks_are_threads(threaded):
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
