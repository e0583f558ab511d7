"""Answers that are generated at the same time share the models in turn."""

import threading

import torch
from targets import make_target

from transformers_gumiho.tools.presenting import DemoArguments
from transformers_gumiho.tools.presenting.web.race import Host


def test_the_lock_goes_round_in_the_order_of_arrival() -> None:
    host, taken = Host(make_target(), None, None, DemoArguments()), []
    all_wait = threading.Event()

    def answer(name: int) -> None:
        host.begin_turn()
        torch.manual_seed(name)
        all_wait.wait(60)
        for _ in range(3):
            taken.append((name, torch.rand(()).item()))
            host.hand_over()
        host.end_turn()

    threads = [threading.Thread(target=answer, args=(name,), daemon=True) for name in range(3)]
    for name, thread in enumerate(threads):
        thread.start()
        while host.num_begun < name + 1:
            thread.join(0.01)
    all_wait.set()
    for thread in threads:
        thread.join(60)
    assert [name for name, _ in taken] == [0, 1, 2] * 3
    for name in range(3):
        torch.manual_seed(name)
        assert [value for other, value in taken if other == name] == [torch.rand(()).item() for _ in range(3)]
