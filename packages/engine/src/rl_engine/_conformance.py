"""The contract of `Engine`, as tests that any backend passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.errors import BatchError, CheckpointError, ConfigError, EngineError, NonFiniteError
from rl_engine.losses import sft_loss, token_mean, token_values
from rl_engine.types import OptimizerConfig, Precision

if TYPE_CHECKING:
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import Engine
    from rl_engine.types import ModelOutput

_LENGTHS = ((3, 1), (9, 8), (1, 12), (14, 3), (7, 20), (5, 2), (5, 2))  # (prompt, completion) tokens of each row


class EngineConformance(ABC):
    """Subclass it, build your engine in `make_engine`, and let pytest collect the subclass. Single process."""

    vocab_size = 32
    """Token ids below it are used."""

    @abstractmethod
    def make_engine(self, folder: Path, **changes: Any) -> Engine:
        """An engine of `EngineConfig(**changes)`, not initialised; the same weights every time. `folder` is yours."""

    def test_logprobs_come_back_in_the_order_of_the_rows(self, tmp_path: Path) -> None:
        """Whatever the cut into micro-batches."""
        whole, cut = self._scores(tmp_path, 4096), self._scores(tmp_path, 40)
        for one, other in zip(whole, cut, strict=True):
            torch.testing.assert_close(one, other)

    def test_rows_of_one_prompt_score_as_they_do_alone(self, tmp_path: Path) -> None:
        """Whatever the engine makes of what they have in common."""
        from rl_engine.testing import ragged_batch

        prompts = [[4, 5, 6], [4, 5], [4, 5, 6], [4, 5, 6]]
        completions = [[7, 8, 9, 10], [6, 7], [11], [12, 13]]
        engine = self._built(tmp_path, optimizer=None)
        together, *alone = (
            engine.forward_backward_batch(ragged_batch(*rows), None).columns.get("logprobs").values()
            for rows in [(prompts, completions), *(([p], [c]) for p, c in zip(prompts, completions, strict=True))]
        )
        engine.close()
        torch.testing.assert_close(together, torch.cat(alone))

    def test_check_says_beforehand_what_initialize_would(self, tmp_path: Path) -> None:
        """And starts nothing."""
        folder = tmp_path / "engine"
        folder.mkdir()
        bad, good = self.make_engine(folder, temperature=0.0), self.make_engine(folder)
        _expect(ConfigError, lambda: bad.check(1))
        _expect(ConfigError, bad.initialize)
        good.check(1)
        _expect(EngineError, good.optimizer_zero_grad)

    def test_any_cut_gives_the_same_step(self, tmp_path: Path) -> None:
        """Loss, metrics, gradient norm and the weights after a step."""
        (loss, norm, weights), *others = [self._step(tmp_path, budget, self._batch()) for budget in (4096, 64, 36)]
        for other_loss, other_norm, other_weights in others:
            assert abs(loss - other_loss) < 1e-6
            assert abs(norm - other_norm) < 1e-5 * norm
            torch.testing.assert_close(weights, other_weights, rtol=1e-5, atol=1e-7)

    def test_masked_tokens_and_rows_count_nowhere(self, tmp_path: Path) -> None:
        """A row without a loss token changes neither loss nor gradient."""
        from rl_engine.testing import ragged_batch

        kept = ragged_batch([[1, 2], [3]], [[4, 5], [6, 7, 8]], [[1, 0], [1, 1, 1]])
        more = ragged_batch([[1, 2], [9, 9], [3]], [[4, 5], [2, 2], [6, 7, 8]], [[1, 0], [0, 0], [1, 1, 1]])
        (loss, norm, _), (other_loss, other_norm, _) = (self._step(tmp_path, 4096, data) for data in (kept, more))
        assert abs(loss - other_loss) < 1e-6
        assert abs(norm - other_norm) < 1e-5 * norm

    def test_it_learns(self, tmp_path: Path) -> None:
        """Thirty steps on one batch take half a nat off its loss."""
        engine, data = self._built(tmp_path, optimizer=OptimizerConfig(lr=3e-2, max_grad_norm=10.0)), self._batch()
        losses: list[float] = []
        with engine.train_mode():
            for _ in range(30):
                engine.optimizer_zero_grad()
                losses.append(engine.forward_backward_batch(data, sft_loss).metrics["loss"])
                engine.optimizer_step()
                engine.lr_scheduler_step()
        engine.close()
        assert losses[-1] < losses[0] - 0.5

    def test_forward_only_leaves_no_gradient(self, tmp_path: Path) -> None:
        """The loss is reported; a step afterwards has nothing to go by."""
        engine = self._built(tmp_path)
        loss = engine.forward_backward_batch(self._batch(), sft_loss, forward_only=True).metrics["loss"]
        norm = engine.optimizer_step()
        engine.close()
        assert loss > 0
        assert norm == 0

    def test_nan_is_refused_and_nothing_changes(self, tmp_path: Path) -> None:
        """A non-finite gradient leaves the weights and the optimizer as they were."""
        engine, data = self._built(tmp_path), self._batch()
        before = _weights(engine)
        engine.forward_backward_batch(data, _nan_loss)
        _expect(NonFiniteError, engine.optimizer_step)
        torch.testing.assert_close(_weights(engine), before, rtol=0, atol=0)
        engine.optimizer_zero_grad()
        after = _one_step(engine, data)
        engine.close()
        loss, norm, weights = self._step(tmp_path, 4096, data)
        assert after[:2] == (loss, norm)
        torch.testing.assert_close(after[2], weights, rtol=0, atol=0)

    def test_a_frozen_engine_scores_and_refuses_to_train(self, tmp_path: Path) -> None:
        """A reference has no optimizer."""
        engine = self._built(tmp_path, optimizer=None)
        with engine.eval_mode():
            columns = engine.forward_backward_batch(self._batch(), None).columns
        assert columns.get("logprobs").values().max() <= 0
        _expect(ConfigError, lambda: engine.forward_backward_batch(self._batch(), sft_loss))
        _expect(ConfigError, engine.optimizer_step)
        engine.close()

    def test_what_is_asked_of_the_distributions_comes(self, tmp_path: Path) -> None:
        """Entropy, sum of squared probabilities and likeliest tokens, and none of them unasked."""
        asked: dict[str, Any] = {"entropy": True, "sum_pi_squared": True, "num_candidates": 2}
        engine = self._built(tmp_path, optimizer=None, **asked)
        columns = engine.forward_backward_batch(self._batch(), None).columns
        names = "logprobs", "entropy", "sum_pi_squared", "candidate_logprobs", "candidate_token_ids"
        scored, entropy, squares, likeliest, token_ids = (columns.get(name).values() for name in names)
        engine.close()
        assert set(columns.keys()) == set(names)
        assert token_ids.shape == likeliest.shape == (len(scored), 2)
        assert (likeliest[:, 0] >= scored - 1e-9).all()
        assert (squares <= likeliest[:, 0].exp() + 1e-9).all()  # a mean of probabilities, none above the highest
        assert (squares >= (-entropy).exp() - 1e-9).all()  # Jensen
        engine = self._built(tmp_path, optimizer=None)
        assert set(engine.forward_backward_batch(self._batch(), None).columns.keys()) == {"logprobs"}
        engine.close()

    def test_bad_batches_are_refused(self, tmp_path: Path) -> None:
        """Missing columns, empty rows, rows over the budget, ids outside the vocabulary."""
        from rl_engine.testing import ragged_batch

        engine = self._built(tmp_path, max_tokens_per_gpu=40)
        without = self._batch()
        del without["completion_token_ids"]
        for data in (
            without,
            ragged_batch([[1], [2]], [[3], []]),
            ragged_batch([[1] * 30], [[2] * 11]),
            ragged_batch([[1]], [[10**6]]),
            ragged_batch([[1]], [[2, 3]], [[1]]),
        ):
            _expect(BatchError, lambda data=data: engine.forward_backward_batch(data, sft_loss))
        engine.close()

    def test_a_checkpoint_continues_where_it_was_written(self, tmp_path: Path) -> None:
        """Weights, optimizer, schedule and step come back, whatever the engine did before."""
        options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2, warmup_steps=3, total_steps=9)}
        engine, data = self._built(tmp_path, **options), self._batch()
        assert abs(engine.learning_rate() - 1e-2 / 3) < 1e-9
        _one_step(engine, data)
        engine.save_checkpoint(tmp_path / "checkpoint", 7)
        straight = _one_step(engine, data)
        engine.close()
        resumed = self._built(tmp_path, **options)
        resumed.forward_backward_batch(data, None)
        assert resumed.load_checkpoint(tmp_path / "checkpoint") == 7
        assert abs(resumed.learning_rate() - 2e-2 / 3) < 1e-9
        again = _one_step(resumed, data)
        resumed.close()
        assert again[:2] == straight[:2]
        torch.testing.assert_close(again[2], straight[2], rtol=0, atol=0)

    def test_an_incomplete_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """A folder without its manifest is no checkpoint."""
        engine = self._built(tmp_path)
        before = _weights(engine)
        engine.save_checkpoint(tmp_path / "checkpoint", 1)
        (tmp_path / "checkpoint" / "manifest.json").unlink()
        _expect(CheckpointError, lambda: engine.load_checkpoint(tmp_path / "checkpoint"))
        torch.testing.assert_close(_weights(engine), before, rtol=0, atol=0)
        engine.close()

    def test_shards_are_the_weights(self, tmp_path: Path) -> None:
        """On one rank each is whole."""
        engine = self._built(tmp_path)
        shards = {spec.name: (spec, tensor.clone()) for spec, tensor in engine.get_local_shards()}
        whole = _weights(engine)
        engine.close()
        torch.testing.assert_close({name: tensor for name, (_, tensor) in shards.items()}, whole, rtol=0, atol=0)
        for spec, tensor in shards.values():
            assert spec.shape == spec.sizes == tuple(tensor.shape)
            assert not any(spec.offsets)

    def test_close_is_final_and_may_be_repeated(self, tmp_path: Path) -> None:
        """Afterwards every call says that there is no model."""
        engine = self._built(tmp_path)
        engine.save_model(tmp_path / "model")
        assert list((tmp_path / "model").iterdir())
        engine.close()
        engine.close()
        _expect(EngineError, engine.optimizer_zero_grad)

    def _built(self, folder: Path, **changes: Any) -> Engine:
        model = folder / "engine"
        model.mkdir(exist_ok=True)
        options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2, eps=1e-3), "precision": Precision.FLOAT64}
        engine = self.make_engine(model, **(options | changes))
        engine.initialize()
        return engine

    def _batch(self) -> TensorDict:
        from rl_engine.testing import ragged_batch

        generator = torch.Generator().manual_seed(1)
        ids = iter(torch.randint(0, self.vocab_size, (sum(map(sum, _LENGTHS)),), generator=generator).tolist())
        rows = [(list(islice(ids, prompt)), list(islice(ids, completion))) for prompt, completion in _LENGTHS]
        mask = [[int(index % 3 != 1) for index in range(len(completion))] for _, completion in rows]
        return ragged_batch([prompt for prompt, _ in rows], [completion for _, completion in rows], mask)

    def _scores(self, folder: Path, budget: int) -> list[Tensor]:
        engine = self._built(folder, max_tokens_per_gpu=budget)
        with engine.eval_mode():
            output = engine.forward_backward_batch(self._batch(), None)
        engine.close()
        rows = output.columns.get("logprobs").unbind()
        assert [len(row) for row in rows] == [completion for _, completion in _LENGTHS]
        return list(rows)

    def _step(self, folder: Path, budget: int, data: TensorDict) -> tuple[float, float, dict[str, Tensor]]:
        engine = self._built(folder, max_tokens_per_gpu=budget)
        outcome = _one_step(engine, data)
        engine.close()
        return outcome


def _one_step(engine: Engine, data: TensorDict) -> tuple[float, float, dict[str, Tensor]]:
    engine.optimizer_zero_grad()
    loss = engine.forward_backward_batch(data, sft_loss).metrics["loss"]
    norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return loss, norm, _weights(engine)


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}


def _nan_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    mask = token_values(rows, "loss_mask", output.logprobs)
    return token_mean(output.logprobs * float("nan"), mask, output), {}


def _expect(error: type[Exception], call: Any) -> None:
    try:
        call()
    except error as raised:
        message = str(raised).strip()
    else:
        raise AssertionError(f"Expected {error.__name__}, and nothing was raised.")
    assert message, f"{error.__name__} came without a sentence"
