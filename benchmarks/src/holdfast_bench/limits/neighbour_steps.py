"""A program for two nodes: equal steps, whose mean time rank 0 writes into the file `out`.

An agent of each node starts it. All bytes of the state change in each step, so that no block of a
copy is left out.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.trainer import Session
from holdfast.trainer.config import config
from holdfast_bench.limits.products import rotation
from holdfast_bench.limits.ranks import Trained


def main() -> None:
    """Train `steps` steps of `products` matrix products and a wait of `wait_s` seconds.

    The first `warm_up` steps do not count.
    """
    settings = config()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trained = Trained(int(settings["state_bytes"]))
    matrix = rotation()
    warm_up, steps = int(settings["warm_up"]), int(settings["steps"])
    began = 0.0
    with Session(trained.model, trained.optimizer) as session:
        for step in session.steps(warm_up + steps):
            if step == warm_up + 1:
                began = time.perf_counter()
            product = matrix
            for _ in range(int(settings["products"])):
                product = matrix @ product
            time.sleep(float(settings["wait_s"]))
            trained.update()
            # As the exchange of gradients, it lets all ranks wait for the slowest one.
            dist.all_reduce(product)
        spent_s = time.perf_counter() - began
        if session.rank == 0:
            Path(settings["out"]).write_text(str(spent_s / steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
