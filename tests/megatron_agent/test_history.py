from __future__ import annotations

import json

from megatron_agent.history import EvaluationHistory
from megatron_agent.settings import EvalSettings


def history(*successes: float) -> EvaluationHistory:
    filled = EvaluationHistory()
    for step, success in enumerate(successes):
        filled.add(step, success)
    return filled


def test_the_best_is_the_first_among_equals():
    assert history().best() is None
    assert history(0.1, 0.5, 0.5, 0.2).best() == (1, 0.5)
    filled = history(0.1)
    assert filled.add(1, 0.2)
    assert not filled.add(2, 0.2)


def test_reasons_to_stop():
    assert history(0.2, 0.9).reason_to_stop(EvalSettings()) == ""
    assert "reached eval.stop_at_success 0.9" in history(0.2, 0.9).reason_to_stop(
        EvalSettings(stop_at_success=0.9)
    )
    patient = EvalSettings(patience=2)
    assert history(0.5, 0.4).reason_to_stop(patient) == ""
    assert "in 2 evaluations" in history(0.5, 0.4, 0.5).reason_to_stop(patient)
    assert history(0.5, 0.4, 0.6).reason_to_stop(patient) == ""


def test_it_survives_a_checkpoint():
    copy = EvaluationHistory()
    copy.restore(json.loads(json.dumps(history(0.25, 1.0).state())))
    assert copy == history(0.25, 1.0)
