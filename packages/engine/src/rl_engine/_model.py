"""A Hugging Face model as a scorer of packed rows: tokens in, one log-prob or one value of every completion token out.

Legend: `T` tokens fed, `C` completion tokens, `B` rows, `L` longest row, `V` vocabulary, `H` hidden.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_csrc import linear_logprobs, logprobs
from rl_engine import _attention
from rl_engine._gather import take_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_csrc import LogProbs
    from rl_engine._rows import PackedRows

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """A language-model head that is no more than `softcap(hidden @ weight.T * scale)`."""

    scale: float
    """Factor of the logits."""
    softcap: float | None
    """`c * tanh(logits / c)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a micro-batch's completion tokens were given, each `[C]`."""

    logprobs: Tensor | None = None
    """Of the tokens, with a language-model head."""
    entropy: Tensor | None = None
    """Of the predicting distributions, where asked for."""
    values: Tensor | None = None
    """Of the states, with a scalar head."""

    @property
    def main(self) -> Tensor:
        """The one that carries the gradient."""
        scores = self.values if self.logprobs is None else self.logprobs
        assert scores is not None
        return scores


class Scorer(nn.Module):
    """Scores packed rows with one model; the root module that is sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.is_packed = _can_pack(model)
        if self.is_packed:
            model.set_attn_implementation(_attention.register())

    def forward(self, rows: PackedRows) -> Scores:
        """Score every completion token."""
        raise NotImplementedError

    def _hidden(self, inputs: dict[str, Any], index: Tensor) -> Tensor:
        return take_rows(self.model.base_model(**inputs).last_hidden_state.flatten(0, 1), index)

    def _inputs(self, rows: PackedRows) -> tuple[dict[str, Any], Tensor]:
        """The model's keyword arguments, and where the scored states lie in its flattened output."""
        if self.is_packed:
            layout = _attention.row_layout(rows.lengths, rows.token_ids.device)
            packed = {"input_ids": rows.token_ids[None], "position_ids": rows.position_ids[None]}
            return {**packed, "use_cache": False, _attention.LAYOUT_KWARG: layout}, rows.score_index
        slot, width = _padded_slots(rows)
        token_ids = rows.token_ids.new_zeros(len(rows.lengths) * width)
        mask = torch.zeros_like(token_ids)
        token_ids[slot], mask[slot] = rows.token_ids, 1
        padded = {"input_ids": token_ids.view(-1, width), "attention_mask": mask.view(-1, width)}
        return {**padded, "use_cache": False}, slot[rows.score_index]


class ValueScorer(Scorer):
    """A sequence classifier with one label, asked at every completion token."""

    def forward(self, rows: PackedRows) -> Scores:
        """One float32 value of each state (float64 for a float64 model)."""
        inputs, index = self._inputs(rows)
        hidden = self._hidden(inputs, index)
        values = self.model.score(hidden)[:, 0]  # pyright: ignore[reportCallIssue]
        return Scores(values=values.to(torch.promote_types(values.dtype, torch.float32)))


class PolicyScorer(Scorer):
    """A causal LM whose logits are never kept."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, entropy: bool) -> None:
        super().__init__(model)
        self.head = find_linear_head(model)
        self._temperature = temperature
        self._entropy = entropy

    def forward(self, rows: PackedRows) -> Scores:
        """Log-prob (and entropy) of each completion token."""
        found = self._score(rows)
        return Scores(logprobs=found.logprobs, entropy=found.entropy)

    def _score(self, rows: PackedRows) -> LogProbs:
        inputs, index = self._inputs(rows)
        if self.head is None:
            return self._score_logits(rows, inputs, index)
        hidden = self._hidden(inputs, index)
        output = self.model.get_output_embeddings()
        assert isinstance(output, nn.Module)
        scale, softcap = self.head.scale, self.head.softcap
        return linear_logprobs(
            hidden if scale == 1 else hidden * scale,
            output.weight,  # pyright: ignore[reportArgumentType]
            rows.labels,
            bias=output.bias * scale if isinstance(output.bias, Tensor) else None,  # pyright: ignore[reportArgumentType, reportOperatorIssue]
            temperature=self._temperature,
            entropy=self._entropy,
            softcap=softcap,
            ignore_index=None,
        )

    def _score_logits(self, rows: PackedRows, inputs: dict[str, Any], index: Tensor) -> LogProbs:
        """For a head that does more than one product: let the model make the (C, V) logits."""
        logits = take_rows(self.model(**inputs).logits.flatten(0, 1), index)
        return logprobs(logits, rows.labels, temperature=self._temperature, entropy=self._entropy, ignore_index=None)


def find_linear_head(model: PreTrainedModel) -> LinearHead | None:
    """Compare the model's logits with a bare product on four tokens; None where no scale of its config fits."""
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or model.base_model is model:
        return None
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        rows = _probe_rows(model)
        want = model(**rows).logits.double()
        bare = output(model.base_model(**rows).last_hidden_state).double()
    model.train(was_training)
    for scale in _scales(config):
        logits = bare * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if torch.allclose(logits, want, rtol=2e-2, atol=2e-2 * float(want.abs().max())):
            return LinearHead(scale=scale, softcap=softcap)
    return None


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether every layer attends through transformers' attention interface and takes positions from outside."""
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    return model.is_backend_compatible() and takes_positions and layers <= _PACKABLE_LAYERS


def _probe_rows(model: PreTrainedModel) -> dict[str, Any]:
    token_ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = {"position_ids": torch.arange(4, device=model.device)[None]} if _can_pack(model) else {}
    layout = {_attention.LAYOUT_KWARG: _attention.row_layout([4], model.device)} if _can_pack(model) else {}
    return {"input_ids": token_ids, "use_cache": False, **positions, **layout}


def _scales(config: Any) -> list[float]:
    """Factors that architectures put on their logits, under the names they give them; 1 first."""
    scales = [1.0]
    scales += [float(value) for name in ("logit_scale", "lm_head_multiplier") if (value := getattr(config, name, None))]
    scales += [1.0 / value for name in ("logits_scaling",) if (value := getattr(config, name, None))]
    return scales


def _padded_slots(rows: PackedRows) -> tuple[Tensor, int]:
    """Slot of each of the T tokens in a right-padded (B, L) block, and L."""
    width = max(rows.lengths)
    row = torch.repeat_interleave(torch.tensor(rows.lengths)).to(rows.token_ids.device)
    return row * width + rows.position_ids, width
