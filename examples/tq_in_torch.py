"""A plain torch loop whose samples come from other processes, by rl-tq: claimed once, acknowledged, bounded in number.

Needs rl-tq alone: `pip install ./csrc ./packages/tq`, then `python examples/tq_in_torch.py`. Two producers draw points
and label them; the trainer fits a line. A producer waits where the trainer is behind, and rows of a trainer that dies
return to the queue.
"""

import multiprocessing

import torch

import rl_tq

BATCH, NUM_STEPS, SLOPE, OFFSET = 16, 60, 3.0, -1.0
OPTIONS = {"max_rows": 4 * BATCH, "tasks": ["train"]}
CLAIM = {"partition": "points", "columns": ["x", "y"], "batch_size": BATCH, "task": "train"}


def produce(address, seed):
    """Put rows until the queue is closed."""
    generator = torch.Generator().manual_seed(seed)
    with rl_tq.connect(address) as queue:
        try:
            while True:
                x = torch.rand(BATCH, generator=generator)
                noise = 0.01 * torch.randn(BATCH, generator=generator)
                queue.put({"x": x, "y": SLOPE * x + OFFSET + noise}, partition="points")
        except rl_tq.ServerLostError:
            return


def main():
    context = multiprocessing.get_context("spawn")
    with rl_tq.serve("shm://") as queue:
        queue.configure("points", **OPTIONS)
        producers = [context.Process(target=produce, args=(queue.address, seed), daemon=True) for seed in (0, 1)]
        for producer in producers:
            producer.start()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(1, NUM_STEPS + 1):
            claimed = queue.get_meta(
                partition="points", columns=["x", "y"], batch_size=BATCH, task="train", timeout_s=60
            )
            rows = queue.get(claimed)
            loss = torch.nn.functional.mse_loss(model(rows["x"][:, None])[:, 0], rows["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.ack(claimed, step=step)  # the rows are cleared, and a waiting producer goes on
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.5f}")
    for producer in producers:
        producer.join(30)
    found = model.weight.item(), model.bias.item()
    print(f"slope {found[0]:.2f}, offset {found[1]:.2f}")
    assert max(abs(found[0] - SLOPE), abs(found[1] - OFFSET)) < 0.3, found


if __name__ == "__main__":
    main()
