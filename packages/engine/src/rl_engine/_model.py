"""A Hugging Face model as a scorer of packed rows: tokens in, one log-prob or one value of every completion token out.

Legend: `T` tokens fed, `C` completion tokens, `B` rows, `L` longest row, `V` vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_csrc import linear_logprobs, logprobs
from rl_engine import _attention
from rl_engine._cost import cost_model
from rl_engine._experts import Routers
from rl_engine._gather import take_rows
from rl_engine._routing import routing_of
from rl_engine._sight import Sight, is_sighted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_csrc import LogProbs
    from rl_engine._cost import CostModel
    from rl_engine._routing import ExpertLoad, Routing
    from rl_engine._rows import PackedRows
    from rl_engine._ulysses import SequenceGroup

_CHUNK = 1024  # tokens whose logits are made at a time
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
    asked: Tensor | None = None
    """(C, K), of the tokens that the batch names as candidates; carries gradient."""
    candidate_token_ids: Tensor | None = None
    """(C, K) int64, the likeliest tokens, where wanted."""
    candidate_logprobs: Tensor | None = None
    """(C, K), theirs, without gradient."""

    @property
    def main(self) -> Tensor:
        """The one that carries the gradient."""
        scores = self.values if self.logprobs is None else self.logprobs
        assert scores is not None
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What the model is given for a micro-batch, and which of its states are scored."""

    arguments: dict[str, Any]
    """Keyword arguments of the model."""
    index: Tensor
    """Where the scored states lie in its flattened output, `[C]`, or this rank's share of them."""
    labels: Tensor
    """The completion tokens that those states predict, `[C]`, or this rank's share of them."""
    candidates: Tensor | None = None
    """(C, K) more tokens to score there."""


class Scorer(nn.Module):
    """Scores packed rows with one model; the root module that is sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.sharers: SequenceGroup | None = None
        self.routers = Routers(model)
        self.sight: Sight | None = None
        self.is_packed = _can_pack(model)
        if self.is_packed:
            name = _attention.register()
            self.sight = Sight(model) if is_sighted(model) else None
            model.set_attn_implementation(name if self.sight is None else {"text_config": name})

    def route(self, rows: PackedRows, load: ExpertLoad | None, *, is_counting: bool = False) -> Routing | None:
        """What the routers are to do with the next `forward`; None without experts."""
        if self.routers.experts is None or not self.is_packed:
            return None
        if self.sharers is None:
            self.routers.routing = routing_of(rows, load, is_counting=is_counting)
        else:
            rows = rows.padded(self.sharers.size)
            start, stop = self.sharers.token_range(rows)
            self.routers.routing = routing_of(rows, load, is_counting=is_counting, start=start, stop=stop)
        return self.routers.routing

    def forward(self, rows: PackedRows) -> Scores:
        """Score every completion token."""
        if self.sharers is None:
            if self.sight is None or rows.has_images:
                return self._score(self._feed(rows))
            return self._with_blank(rows, self.sight)
        rows = rows.padded(self.sharers.size)
        scores, gather = self._score(self._feed_share(rows, self.sharers)), self.sharers.gather_scores
        return Scores(
            **{
                name: None if (column := getattr(scores, name)) is None else gather(column, rows)
                for name in ("logprobs", "entropy", "values")
            }
        )

    def _with_blank(self, rows: PackedRows, sight: Sight) -> Scores:
        """Scores that the vision tower has no part in, though it runs first, as it does where there are images."""
        zero = sight.blank(rows.token_ids.device)
        scores = self._score(self._feed(rows))
        main = scores.main + zero.to(scores.main.dtype)
        return replace(scores, values=main) if scores.logprobs is None else replace(scores, logprobs=main)

    def _score(self, fed: Fed) -> Scores:
        raise NotImplementedError

    def _hidden(self, fed: Fed) -> Tensor:
        return take_rows(self.model.base_model(**fed.arguments).last_hidden_state.flatten(0, 1), fed.index)

    def _feed(self, rows: PackedRows) -> Fed:
        if self.is_packed:
            layout = _attention.row_layout(rows.lengths, rows.token_ids.device)
            packed = {"input_ids": rows.token_ids[None], "position_ids": rows.position_ids[None]}
            arguments = {**packed, "use_cache": False, _attention.LAYOUT_KWARG: layout}
            if self.sight is not None:
                arguments |= self.sight.arguments(rows, *_padded_slots(rows))
            return Fed(arguments=arguments, index=rows.score_index, labels=rows.labels, candidates=rows.candidates)
        slot, width = _padded_slots(rows)
        token_ids = rows.token_ids.new_zeros(len(rows.lengths) * width)
        mask = torch.zeros_like(token_ids)
        token_ids[slot], mask[slot] = rows.token_ids, 1
        padded = {"input_ids": token_ids.view(-1, width), "attention_mask": mask.view(-1, width)}
        index = slot[rows.score_index]
        arguments = {**padded, "use_cache": False}
        return Fed(arguments=arguments, index=index, labels=rows.labels, candidates=rows.candidates)

    def _feed_share(self, rows: PackedRows, sharers: SequenceGroup) -> Fed:
        """This rank's slice of the packed tokens."""
        start, stop = sharers.token_range(rows)
        first, last = sharers.score_range(rows)
        arguments = {
            "input_ids": rows.token_ids[None, start:stop],
            "position_ids": rows.position_ids[None, start:stop],
            "use_cache": False,
            _attention.LAYOUT_KWARG: _attention.row_layout(rows.lengths, rows.token_ids.device, sharers),
        }
        return Fed(arguments=arguments, index=rows.score_index[first:last] - start, labels=rows.labels[first:last])


class ValueScorer(Scorer):
    """A sequence classifier with one label, asked at every completion token."""

    def _score(self, fed: Fed) -> Scores:
        """One float32 value of each state (float64 for a float64 model)."""
        values = self.model.score(self._hidden(fed))[:, 0]  # pyright: ignore[reportCallIssue]
        return Scores(values=values.to(torch.promote_types(values.dtype, torch.float32)))


class PolicyScorer(Scorer):
    """A causal LM whose logits are never kept."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, entropy: bool, num_candidates: int = 0) -> None:
        super().__init__(model)
        self.head: LinearHead | None = None  # see `find_linear_head`; with None the model makes its logits itself
        self._temperature = temperature
        self._entropy = entropy
        self._num_candidates = num_candidates

    def _score(self, fed: Fed) -> Scores:
        """Log-prob (and entropy) of each completion token, and of candidates."""
        if self.head is None:
            # The head does more than one product: let the model make the (C, V) logits.
            logits = take_rows(self.model(**fed.arguments).logits.flatten(0, 1), fed.index)
            found = logprobs(logits, fed.labels, **self._wanted())
            lookup = _FromLogits(logits / self._temperature)
        else:
            hidden = self._hidden(fed)
            found = self._linear(hidden, fed.labels)
            lookup = _FromStates(hidden, self._output(), self.head, self._temperature)
        asked = token_ids = likeliest = None
        if fed.candidates is not None:
            asked = lookup.of(torch.cat([fed.labels[:, None], fed.candidates], 1))
            asked = asked[:, 1:] - asked[:, :1] + found.logprobs[:, None]
        if self._num_candidates:
            token_ids, likeliest = lookup.likeliest(self._num_candidates)
        return Scores(
            logprobs=found.logprobs,
            entropy=found.entropy,
            asked=asked,
            candidate_token_ids=token_ids,
            candidate_logprobs=likeliest,
        )

    def _wanted(self) -> dict[str, Any]:
        return {"temperature": self._temperature, "entropy": self._entropy, "ignore_index": None}

    def _output(self) -> nn.Linear:
        output = self.model.get_output_embeddings()
        assert isinstance(output, nn.Linear)
        return output

    def _linear(self, hidden: Tensor, labels: Tensor) -> LogProbs:
        assert self.head is not None
        output, scale = self._output(), self.head.scale
        return linear_logprobs(
            hidden if scale == 1 else hidden * scale,
            output.weight,
            labels,
            bias=None if output.bias is None else output.bias * scale,  # pyright: ignore[reportUnnecessaryComparison]
            softcap=self.head.softcap,
            **self._wanted(),
        )


class _FromLogits:
    """Candidates of tokens whose logits are here anyway."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

    def of(self, token_ids: Tensor) -> Tensor:
        """(C, K) logits."""
        return self._logits.gather(1, token_ids)

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """(C, K) token ids and their log-probs."""
        found = self._logits.detach().log_softmax(-1).topk(count, -1)
        return found.indices, found.values


class _FromStates:
    """Candidates of tokens whose logits are not kept: a few rows of the head each, or a chunk of tokens at a time."""

    def __init__(self, hidden: Tensor, output: nn.Linear, head: LinearHead, temperature: float) -> None:
        self._hidden, self._output, self._head, self._temperature = hidden, output, head, temperature

    def of(self, token_ids: Tensor) -> Tensor:
        """(C, K) logits, with gradient; `C * K * H` numbers are gathered."""
        weight, bias = self._output.weight, self._output.bias
        logits = torch.einsum("ch,ckh->ck", self._hidden, weight[token_ids])
        return self._final(logits if bias is None else logits + bias[token_ids])  # pyright: ignore[reportUnnecessaryComparison]

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """(C, K) token ids and their log-probs, without gradient."""
        token_ids, values = [self._hidden.new_empty(0, count, dtype=torch.int64)], [self._hidden.new_empty(0, count)]
        with torch.no_grad():
            for hidden in self._hidden.split(_CHUNK):
                logits = torch.nn.functional.linear(hidden, self._output.weight, self._output.bias)
                found = self._final(logits).log_softmax(-1).topk(count, -1)
                token_ids.append(found.indices)
                values.append(found.values)
        return torch.cat(token_ids), torch.cat(values[1:] or values)

    def _final(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self._head.scale
        if (cap := self._head.softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits / self._temperature


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


def model_cost(model: PreTrainedModel) -> CostModel:
    """What a row costs on this model."""
    trunk = dict(model.base_model.named_parameters())
    tables = {id(model.get_input_embeddings().weight)}  # pyright: ignore[reportOptionalMemberAccess]
    shapes = {name: tuple(weight.shape) for name, weight in trunk.items() if id(weight) not in tables}
    return cost_model(model.config.get_text_config(), shapes)


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
