"""The contract of `Engine`, as tests that any backend passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.batch.packed import ragged_batch
from rl_engine.errors import BatchError, CheckpointError, ConfigError, EngineError, NonFiniteError
from rl_engine.losses import DpoLoss, row_mean, row_sum, sft_loss, token_mean, token_values
from rl_engine.types import OptimizerConfig, Precision
from rl_engine.types.manifest import find_damage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import Engine, LossFunction
    from rl_engine.types import ModelOutput

_LENGTHS = ((3, 1), (9, 8), (1, 12), (14, 3), (7, 20), (5, 2), (5, 2))  # (prompt, completion) tokens of each row


class EngineConformance(ABC):
    """Subclass it, build your engine in `make_engine`, and let pytest collect the subclass. Single process."""

    vocab_size = 32
    """Token ids below it are used."""
    precision = Precision.FLOAT64
    """FLOAT32 where the backend has no float64: comparisons are looser then."""

    @abstractmethod
    def make_engine(self, folder: Path, **changes: Any) -> Engine:
        """An engine of `EngineConfig(**changes)`, not initialised; the same weights every time. `folder` is yours."""

    def test_logprobs_come_back_in_the_order_of_the_rows(self, tmp_path: Path) -> None:
        """Whatever the cut into micro-batches."""
        whole, cut = self._scores(tmp_path, 4096), self._scores(tmp_path, 40)
        for one, other in zip(whole, cut, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.finfo(whole[0].dtype).bits >= 32
        assert not whole[0].requires_grad

    def test_rows_of_one_prompt_score_as_they_do_alone(self, tmp_path: Path) -> None:
        """Whatever the engine makes of what they have in common."""
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
        bad, good = self.make_engine(folder, num_candidates=10**9), self.make_engine(folder)
        _expect(ConfigError, lambda: bad.check(1))
        _expect(ConfigError, bad.initialize)
        good.check(1)
        _expect(EngineError, good.optimizer_zero_grad)

    def test_any_cut_gives_the_same_step(self, tmp_path: Path) -> None:
        """Loss, metrics, gradient norm and the weights after a step."""
        (metrics, norm, weights), *others = [self._step(tmp_path, budget, self._batch()) for budget in (4096, 64, 36)]
        for other_metrics, other_norm, other_weights in others:
            assert metrics.keys() == {"loss", "by_row"}
            self._same(other_metrics, metrics)
            torch.testing.assert_close(other_norm, norm, rtol=self._near, atol=0)
            torch.testing.assert_close(
                weights, other_weights, rtol=self._near, atol=1e-7 if self.precision == Precision.FLOAT64 else 1e-5
            )

    def test_pairs_are_not_cut_apart(self, tmp_path: Path) -> None:
        """Their loss does not depend on the cut, and half a pair is refused."""
        found: list[dict[str, float]] = []
        for budget in (4096, 40):
            engine, data = self._built(tmp_path, max_tokens_per_gpu=budget), self._batch(6)
            data["pair_id"], data["is_chosen"] = torch.tensor([0, 1, 2, 0, 2, 1]), torch.arange(6) < 3
            found.append(engine.forward_backward_batch(data, DpoLoss(is_reference_free=True)).metrics)
            data["is_chosen"] = torch.arange(6) < 4
            _expect(BatchError, partial(engine.forward_backward_batch, data, sft_loss))
            engine.close()
        self._same(*found)

    def test_masked_tokens_and_rows_count_nowhere(self, tmp_path: Path) -> None:
        """A row without a loss token changes neither loss nor gradient."""
        kept = ragged_batch([[1, 2], [3]], [[4, 5], [6, 7, 8]], [[1, 0], [1, 1, 1]])
        more = ragged_batch([[1, 2], [9, 9], [3]], [[4, 5], [2, 2], [6, 7, 8]], [[1, 0], [0, 0], [1, 1, 1]])
        (metrics, norm, _), (other_metrics, other_norm, _) = (
            self._step(tmp_path, 4096, _with_columns(data)) for data in (kept, more)
        )
        self._same(other_metrics, metrics)
        torch.testing.assert_close(other_norm, norm, rtol=self._near, atol=0)

    def test_no_rows_are_a_batch(self, tmp_path: Path) -> None:
        """As a rank may have."""
        engine = self._built(tmp_path)
        output = engine.forward_backward_batch(ragged_batch([], []), sft_loss)
        norm = engine.optimizer_step()
        engine.close()
        assert output.columns.batch_size == (0,)
        assert output.columns.get("logprobs").values().numel() == 0
        assert norm == 0

    def test_gradients_add_up_until_they_are_dropped(self, tmp_path: Path) -> None:
        """Whatever the engine does in between."""
        data = self._batch()
        once = self._step(tmp_path, 4096, data)[1]
        engine = self._built(tmp_path)
        engine.forward_backward_batch(data, _loss)
        with engine.eval_mode():
            engine.forward_backward_batch(data, None)
        engine.to("cpu")
        with engine.train_mode():
            _expect(BatchError, partial(engine.forward_backward_batch, data.exclude("loss_mask"), _loss))
            engine.forward_backward_batch(data, _loss)
            twice = engine.optimizer_step()
            engine.optimizer_zero_grad()
            none = engine.optimizer_step()
        engine.close()
        torch.testing.assert_close(twice, 2 * once, rtol=self._near, atol=0)
        assert none == 0

    def test_the_norm_is_that_before_clipping(self, tmp_path: Path) -> None:
        """The step is taken with the remaining rows."""
        norms, moves = list[float](), list[float]()
        for limit in (1e-3, 1e3):
            engine = self._built(tmp_path, optimizer=OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=limit))
            before = _weights(engine)
            _, norm, _, after = _one_step(engine, self._batch())
            engine.close()
            norms.append(norm)
            moves.append(max(float((after[name] - tensor).abs().max()) for name, tensor in before.items()))
        torch.testing.assert_close(*norms, rtol=self._near, atol=0)
        assert moves[0] < 0.9 * moves[1]

    def test_the_schedule_is_that_of_the_steps(self, tmp_path: Path) -> None:
        """At a rate of zero weights stay as they are."""
        engine, data = self._built(tmp_path, optimizer=OptimizerConfig(lr=1e-2, total_steps=1)), self._batch()
        assert engine.learning_rate() == 1e-2
        engine.forward_backward_batch(data, sft_loss)
        engine.optimizer_step()
        assert engine.lr_scheduler_step() == engine.learning_rate() == 0
        before = _weights(engine)
        engine.optimizer_step()
        torch.testing.assert_close(_weights(engine), before, rtol=0, atol=0)
        engine.close()

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
        metrics, norm, weights = self._step(tmp_path, 4096, data)
        assert after[:2] == (metrics, norm)
        torch.testing.assert_close(after[3], weights, rtol=0, atol=0)

    def test_a_frozen_engine_scores_and_refuses_to_train(self, tmp_path: Path) -> None:
        """A reference has no optimizer, and here no adapter to turn off."""
        engine = self._built(tmp_path, optimizer=None)
        with engine.eval_mode():
            columns = engine.forward_backward_batch(self._batch(), None).columns
        assert columns.get("logprobs").values().max() <= 0
        _expect(ConfigError, lambda: engine.forward_backward_batch(self._batch(), sft_loss))
        _expect(ConfigError, engine.optimizer_step)
        _expect(ConfigError, lambda: engine.adapter_off().__enter__())
        engine.close()

    def test_what_is_asked_of_the_distributions_comes(self, tmp_path: Path) -> None:
        """Entropy, sum of squared probabilities and likeliest tokens, and none of them unasked."""
        asked: dict[str, Any] = {"entropy": True, "sum_pi_squared": True, "num_candidates": 2}
        engine = self._built(tmp_path, optimizer=None, **asked)
        columns = engine.forward_backward_batch(self._batch(), None).columns
        names = "logprobs", "entropy", "sum_pi_squared", "candidate_logprobs", "candidate_token_ids"
        scored, entropy, squares, likeliest, token_ids = (columns.get(name).values() for name in names)
        engine.close()
        near = 1e-9 if self.precision == Precision.FLOAT64 else 1e-5
        assert set(columns.keys()) == set(names)
        assert token_ids.shape == likeliest.shape == (len(scored), 2)
        assert (likeliest[:, 0] >= scored - near).all()
        assert (squares <= likeliest[:, 0].exp() + near).all()  # a mean of probabilities, none above the highest
        assert (squares >= (-entropy).exp() - near).all()  # Jensen
        engine = self._built(tmp_path, optimizer=None)
        assert set(engine.forward_backward_batch(self._batch(), None).columns.keys()) == {"logprobs"}
        engine.close()

    def test_the_likeliest_tokens_score_what_was_said_of_them(self, tmp_path: Path) -> None:
        """At any temperature: the next token is scored, given all tokens before it and nothing else."""
        gaps: list[Tensor] = []
        for temperature in (1.0, 2.0):
            engine = self._built(tmp_path, optimizer=None, num_candidates=2, temperature=temperature)
            columns = engine.forward_backward_batch(ragged_batch([[4, 5, 6]], [[7]]), None).columns
            found, said = (columns.get(name).values()[0] for name in ("candidate_token_ids", "candidate_logprobs"))
            tried = ragged_batch([[4, 5, 6]] * 2, [[int(token)] for token in found])
            scored = engine.forward_backward_batch(tried, None).columns.get("logprobs").values()
            engine.close()
            torch.testing.assert_close(scored, said)
            gaps.append(said[0] - said[1])
        torch.testing.assert_close(gaps[0], 2 * gaps[1])

    def test_candidates_are_scored_in_the_place_of_each_token(self, tmp_path: Path) -> None:
        """With the token itself among them, its own log-prob."""
        engine, data = self._built(tmp_path, max_tokens_per_gpu=40), self._batch()
        tokens = data.get("completion_token_ids")
        asked = torch.stack([(tokens.values() + 1) % self.vocab_size, tokens.values()], 1)
        data["candidate_token_ids"] = torch.nested.nested_tensor_from_jagged(asked, tokens.offsets())

        def compare(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            torch.testing.assert_close(output.candidate_logprobs[:, 1], output.logprobs)
            assert (output.candidate_logprobs[:, 0] != output.logprobs).all()
            return sft_loss(output, rows)

        engine.forward_backward_batch(data, compare)
        engine.close()

    def test_bad_batches_are_refused(self, tmp_path: Path) -> None:
        """Missing columns, empty rows, rows over the budget, ids outside the vocabulary."""
        engine = self._built(tmp_path, max_tokens_per_gpu=40)
        for data in (
            self._batch().exclude("completion_token_ids"),
            ragged_batch([[1], [2]], [[3], []]),
            ragged_batch([[1] * 30], [[2] * 11]),
            ragged_batch([[1]], [[10**6]]),
            ragged_batch([[1]], [[2, 3]], [[1]]),
        ):
            _expect(BatchError, partial(engine.forward_backward_batch, data, sft_loss))
        engine.close()

    def test_a_checkpoint_continues_where_it_was_written(self, tmp_path: Path) -> None:
        """Weights, optimizer, schedule, random numbers and step come back, in the place of what was saved before."""
        options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2, warmup_steps=3, total_steps=9)}
        engine, data = self._built(tmp_path, **options), self._batch()
        assert abs(engine.learning_rate() - 1e-2 / 3) < 1e-9
        engine.save_checkpoint(tmp_path / "checkpoint", 3)
        _one_step(engine, data)
        engine.save_checkpoint(tmp_path / "checkpoint", 7)
        drawn = torch.rand(4)
        straight = _one_step(engine, data)
        engine.close()
        resumed = self._built(tmp_path, **options)
        resumed.forward_backward_batch(data, None)
        assert resumed.load_checkpoint(tmp_path / "checkpoint") == 7
        assert torch.equal(torch.rand(4), drawn)
        assert abs(resumed.learning_rate() - 2e-2 / 3) < 1e-9
        resumed.to("cpu")
        with resumed.train_mode():
            again = _one_step(resumed, data)
        resumed.close()
        assert again[:3] == straight[:3]
        torch.testing.assert_close(again[3], straight[3], rtol=0, atol=0)

    def test_an_incomplete_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """A folder without its manifest is no checkpoint, and neither is one that is not there."""
        engine = self._built(tmp_path)
        before = _weights(engine)
        engine.save_checkpoint(tmp_path / "checkpoint", 1)
        (tmp_path / "checkpoint" / "manifest.json").unlink()
        for name in ("checkpoint", "none"):
            _expect(CheckpointError, partial(engine.load_checkpoint, tmp_path / name))
        torch.testing.assert_close(_weights(engine), before, rtol=0, atol=0)
        engine.close()

    def test_a_damaged_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """A flipped bit in any file, and a missing file, are reported by the file's name; nothing changes."""
        engine = self._built(tmp_path)
        before = _weights(engine)
        folder = tmp_path / "checkpoint"
        engine.save_checkpoint(folder, 1)
        assert find_damage(folder / "manifest.json") == []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            written = file.read_bytes()
            flipped = bytearray(written)
            flipped[len(flipped) // 2] ^= 4
            for content in (bytes(flipped), written[:-1], None):
                file.unlink() if content is None else file.write_bytes(content)
                (line,) = find_damage(folder / "manifest.json")
                assert file.name in line
                _expect(CheckpointError, partial(engine.load_checkpoint, folder), file.name)
            file.write_bytes(written)
        assert engine.load_checkpoint(folder) == 1
        torch.testing.assert_close(_weights(engine), before, rtol=0, atol=0)
        engine.close()

    def test_shards_are_the_weights(self, tmp_path: Path) -> None:
        """On one rank each is whole."""
        engine = self._built(tmp_path)
        whole = _weights(engine)
        try:
            shards = {spec.name: (spec, tensor.clone()) for spec, tensor in engine.get_local_shards()}
        except ConfigError:  # the backend exports whole tensors only
            return
        finally:
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

    def _same(self, found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
        """Metrics of the same step."""
        exact = self.precision == Precision.FLOAT64
        torch.testing.assert_close(found, wanted, rtol=1e-7 if exact else 1e-5, atol=1e-7 if exact else 1e-5)

    @property
    def _near(self) -> float:
        """Relative difference that the same step may have."""
        return 1e-5 if self.precision == Precision.FLOAT64 else 1e-3

    def _built(self, folder: Path, **changes: Any) -> Engine:
        model = folder / "engine"
        model.mkdir(exist_ok=True)
        options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2, eps=1e-3), "precision": self.precision}
        engine = self.make_engine(model, **(options | changes))
        engine.initialize()
        return engine

    def _batch(self, num_rows: int = len(_LENGTHS)) -> TensorDict:
        generator = torch.Generator().manual_seed(1)
        ids = iter(torch.randint(0, self.vocab_size, (sum(map(sum, _LENGTHS)),), generator=generator).tolist())
        rows = [
            (list(islice(ids, prompt)), list(islice(ids, completion))) for prompt, completion in _LENGTHS[:num_rows]
        ]
        mask = [[int(index % 3 != 1) for index in range(len(completion))] for _, completion in rows]
        return _with_columns(ragged_batch([row[0] for row in rows], [row[1] for row in rows], mask))

    def _scores(self, folder: Path, budget: int) -> list[Tensor]:
        engine = self._built(folder, max_tokens_per_gpu=budget)
        with engine.eval_mode():
            output = engine.forward_backward_batch(self._batch(), None)
        engine.close()
        rows = output.columns.get("logprobs").unbind()
        assert [len(row) for row in rows] == [completion for _, completion in _LENGTHS]
        assert (output.num_micro_batches > 1) == (budget < sum(map(sum, _LENGTHS)))
        return list(rows)

    def _step(self, folder: Path, budget: int, data: TensorDict) -> tuple[dict[str, float], float, dict[str, Tensor]]:
        """Metrics, gradient norm and weights after a step; micro-batches are within the budget."""

        def within_budget(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            tokens = sum(rows.get(name).values().numel() for name in ("prompt_token_ids", "completion_token_ids"))
            assert tokens <= budget, f"a micro-batch has {tokens} tokens, max_tokens_per_gpu is {budget}"
            return _loss(output, rows)

        engine = self._built(folder, max_tokens_per_gpu=budget)
        metrics, norm, _, weights = _one_step(engine, data, within_budget)
        engine.close()
        return metrics, norm, weights


def _with_columns(data: TensorDict) -> TensorDict:
    """More columns of either kind, for `_loss`."""
    tokens = data.get("completion_token_ids")
    data["advantages"] = torch.nested.nested_tensor_from_jagged(tokens.values() / 10, tokens.offsets())
    data["weight"] = data.get("prompt_token_ids").values()[data.get("prompt_token_ids").offsets()[:-1]] / 10
    return data


def _loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Reads them, and both counts."""
    mask, advantages = (token_values(rows, name, output.logprobs) for name in ("loss_mask", "advantages"))
    by_row = row_mean(row_sum(output.logprobs * mask, output) * rows.get("weight"), output)
    return -token_mean(output.logprobs * advantages, mask, output) - by_row, {"by_row": by_row.detach()}


def _one_step(
    engine: Engine, data: TensorDict, loss: LossFunction = _loss
) -> tuple[dict[str, float], float, float, dict[str, Tensor]]:
    """Metrics, gradient norm, next rate and weights."""
    engine.optimizer_zero_grad()
    metrics = engine.forward_backward_batch(data, loss).metrics
    return metrics, engine.optimizer_step(), engine.lr_scheduler_step(), _weights(engine)


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}


def _nan_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    mask = token_values(rows, "loss_mask", output.logprobs)
    return token_mean(output.logprobs * float("nan"), mask, output), {}


def _expect(error: type[Exception], call: Any, naming: str = "") -> None:
    try:
        call()
    except error as raised:
        message = str(raised).strip()
    else:
        raise AssertionError(f"Expected {error.__name__}, and nothing was raised.")
    assert message, f"{error.__name__} came without a sentence"
    assert naming in message, f"{error.__name__} does not name {naming}: {message}"
