"""What may be evaluated, and where the result goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import cli
from launch.config import load_config
from launch.targets import address_problem, is_named_model, result_file


@pytest.mark.parametrize(
    ("target", "fine"),
    [
        ("http://localhost:8000/v1", True),
        ("https://api.example.org/v1/", True),
        ("http://", False),
        ("http://host:port/v1", False),
        ("http://host:99999/v1", False),
        ("http://host/v1?model=x", False),
    ],
)
def test_addresses(target: str, fine: bool) -> None:
    assert (address_problem(target) == "") is fine


def test_results_go_into_the_target_or_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["recipe=smoke"], "eval")
    assert result_file(config, "runs/mine") == Path("runs/mine/evaluation.json")
    assert result_file(config, "smollm2") == Path("runs/evaluation-smollm2.json")
    address = "http://localhost:8000/v1"
    assert result_file(config, address) == Path("runs/evaluation-localhost-8000-v1.json")
    (tmp_path / "smollm2").mkdir()
    assert not is_named_model("smollm2")
    assert result_file(config, "smollm2") == Path("smollm2/evaluation.json")


def test_dry_run_of_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "http://localhost:8000/v1", "eval.api_mode=chat", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "chat, 64 at once" in out
    assert "runs/evaluation-localhost-8000-v1.json" in out
    assert cli.main(["eval", "http://h:x/v1", "--dry-run"]) == 1
    assert "allowed: http://HOST:PORT/v1" in capsys.readouterr().err
    assert cli.main(["eval", "http://h:1/v1", "eval.api_mode=text", "--dry-run"]) == 1
    assert "allowed: tokens | chat" in capsys.readouterr().err
