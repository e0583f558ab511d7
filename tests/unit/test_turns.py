"""Answers that are written at the same time share the models fairly."""

import threading

import pytest
import torch

from transformers_gumiho.presenting.web.turns import Turns


def test_turns_are_fair_in_time() -> None:
    """Steps of one answer take four times as long as those of two others, of which one comes late."""
    now = [0.0]
    turns = Turns(torch.device("cpu"), clock=lambda: now[0])
    steps = {"slow": 4.0, "quick": 1.0, "late": 1.0}
    seconds = dict.fromkeys(steps, 0.0)
    told: dict[str, float] = {}
    before_late: dict[str, float] = {}
    others_are_at_work, late_is_done = threading.Event(), threading.Event()

    def work(name: str) -> None:
        if name == "late":
            assert others_are_at_work.wait(60)
        with turns.join(0) as turn:
            if name == "late":
                before_late.update(seconds)
            for _ in range(100_000):
                # Only who has the models is here.
                now[0] += steps[name]
                seconds[name] += steps[name]
                if min(seconds["slow"], seconds["quick"]) >= 20:
                    others_are_at_work.set()
                if seconds["late"] >= 40:
                    late_is_done.set()
                if late_is_done.is_set():
                    break
                turn.give_way()
        told[name] = turn.seconds

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == seconds
    # Who comes late is level with the others from then on: it neither catches up first nor waits for their end. Any
    # two are a slow step apart at most, when it comes as when it is done.
    for name in ("slow", "quick"):
        assert seconds[name] - before_late[name] == pytest.approx(40, abs=8)
