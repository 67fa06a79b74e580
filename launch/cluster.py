"""The Ray cluster of a run: one of its own on this machine, or a running one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_agent.settings import ClusterSettings


@contextmanager
def ray_cluster(settings: ClusterSettings, *, cpus: int) -> Iterator[None]:
    """Connect to Ray for the time of the block.

    `local` starts a cluster with a temporary folder of its own, so that other clusters on the machine are
    neither joined nor disturbed. `cpus` is how many CPU slots the run's actors ask for: on a machine with
    fewer cores they are shared, since the phases of a step alternate.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    folder = None
    if settings.address == "local":
        folder = tempfile.mkdtemp(prefix="ma-ray-")
        ray.init(
            address="local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=int(settings.object_store_gib * 2**30),
            logging_level="ERROR",
            _temp_dir=folder,
        )
    else:
        ray.init(address=settings.address, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
