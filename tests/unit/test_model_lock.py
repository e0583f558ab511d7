"""Answers that are generated at the same time share the models in turn."""

import threading

import torch

from transformers_gumiho.presenting.web.race import Hold, ModelLock


def test_the_lock_goes_round_in_the_order_of_arrival() -> None:
    lock, taken = ModelLock(torch.device("cpu")), []
    arrived = [threading.Event() for _ in range(3)]

    def answer(name: int) -> None:
        with Hold(lock, seed=name) as hold:
            arrived[name].set()
            if name == 0:
                # All others wait in the queue before the first turn ends.
                while len(lock.queue) < 3:
                    arrived[0].wait(0.01)
            for _ in range(3):
                taken.append((name, torch.rand(()).item()))
                hold.hand_over()

    threads = []
    for name in range(3):
        threads.append(threading.Thread(target=answer, args=(name,), daemon=True))
        threads[-1].start()
        while len(lock.queue) < name + 1:
            threads[-1].join(0.01)
    for thread in threads:
        thread.join(60)
    assert [name for name, _ in taken] == [0, 1, 2] * 3
    for name in range(3):
        torch.manual_seed(name)
        assert [value for other, value in taken if other == name] == [torch.rand(()).item() for _ in range(3)]
