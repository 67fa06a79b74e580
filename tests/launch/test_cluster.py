"""Ray's own start-up limit on a busy machine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray

from launch.cluster import STARTS, ClusterError, ray_cluster
from megatron_agent.settings import ClusterSettings

SETTINGS = ClusterSettings(address="local", object_store_gib=0.1)
TOO_SLOW = Exception("The current node timed out during startup. This could happen because ...")


def failing(monkeypatch: pytest.MonkeyPatch, times: int, error: Exception) -> list[str]:
    """Let Ray fail to start `times` times; the folders that it was given."""
    folders: list[str] = []
    really_start = ray.init

    def start(**settings: Any) -> Any:
        folders.append(settings["_temp_dir"])
        if len(folders) <= times:
            raise error
        return really_start(**settings)

    monkeypatch.setattr(ray, "init", start)
    return folders


def test_a_slow_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders = failing(monkeypatch, 1, TOO_SLOW)
    with caplog.at_level(logging.WARNING), ray_cluster(SETTINGS, cpus=3):
        assert ray.cluster_resources()["CPU"] >= 3
    assert len(set(folders)) == len(folders) >= 2
    assert "start 1 of 3" in caplog.text
    assert not ray.is_initialized()


def test_a_machine_on_which_ray_never_starts_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = failing(monkeypatch, STARTS, TOO_SLOW)
    with pytest.raises(ClusterError, match="Ray did not start"), ray_cluster(SETTINGS, cpus=1):
        pass
    assert len(folders) == STARTS


def test_another_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = failing(monkeypatch, 1, ValueError("no"))
    with pytest.raises(ValueError, match="no"), ray_cluster(SETTINGS, cpus=1):
        pass
    assert len(folders) == 1
