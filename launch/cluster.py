"""The Ray cluster of a run: one of its own on this machine, or a running one."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_agent.errors import MegatronAgentError
from megatron_agent.settings import ClusterSettings

log = logging.getLogger("megatron_agent")

STARTS = 3
"""Ray gives a node 30 s to start, which no setting changes and a busy machine can exceed."""


class ClusterError(MegatronAgentError):
    """Ray did not start."""


@contextmanager
def ray_cluster(settings: ClusterSettings, *, cpus: int) -> Iterator[None]:
    """Connect to Ray for the time of the block.

    `local` starts a cluster with a temporary folder of its own, so that other clusters on the machine are
    neither joined nor disturbed. `cpus` is how many CPU slots the run's actors ask for: on a machine with
    fewer cores they are shared, since the phases of a step alternate. Raises ClusterError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    folder = None
    if settings.address == "local":
        folder = _start_local(settings, max(cpus, os.cpu_count() or 1))
    else:
        ray.init(address=settings.address, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _start_local(settings: ClusterSettings, cpus: int) -> str:
    """Start a cluster and return its temporary folder."""
    import ray

    for start in range(1, STARTS + 1):
        folder = tempfile.mkdtemp(prefix="ma-ray-")
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=int(settings.object_store_gib * 2**30),
                logging_level="ERROR",
                _temp_dir=folder,
            )
            return folder
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            # Ray raises a bare Exception: only its text tells this one from others.
            if "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start within its 30 s (start %d of %d)", start, STARTS)
    raise ClusterError(f"Ray did not start in {STARTS} times 30 s: is this machine busy or out of memory?")
