"""What the controller costs: one step of the on-policy pipeline with workers that answer at once."""

from rl_bench import Run
from rl_trainer.config import load_config
from rl_trainer.pipelines.sync import run_sync
from rl_trainer.testing import FakeJob


def main(run: Run) -> None:
    num_steps = 3
    for batch_size, goal in ((64, None), (1024, "<= 50 ms")):
        config = load_config(
            "quickstart",
            [
                f"batch.batch_size={batch_size}",
                f"batch.mini_batch_size={batch_size // 4}",
                "batch.group_size=8",
                f"steps={num_steps}",
                "eval_every=0",
            ],
        )

        def steps(config=config):
            for _ in run_sync(FakeJob(config).parts(), config, []):
                pass

        run.compare(
            f"controller time per step, {batch_size * 8} samples",
            {"ours": steps},
            unit="ms",
            inner=1,
            amount=None,
            goal=goal,
        )
    run.parameters(steps_per_call=num_steps, group_size=8)
