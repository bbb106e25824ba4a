"""Log-probs of completion tokens by a head whose logits are never stored, or values of a scalar head.

Legend: `C` completion tokens, `V` vocabulary, `H` hidden, `K` candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc import linear_logprobs, linear_loss, logprobs
from rl_engine.types import Head

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_csrc.types import LogProbs
    from rl_engine.batch.packed import PackedRows
    from rl_engine.types import EngineConfig, ModelOutput

_CHUNK = 1024  # tokens whose logits are made at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """A language-model head that is no more than `softcap(hidden @ weight.T * scale)`."""

    scale: float = 1.0
    """Factor of the logits."""
    softcap: float | None = None
    """`c * tanh(logits / c)`."""


class HeadLoss:
    """A token-local loss of one micro-batch, which its head makes while the logits are there, with their gradient."""

    def __init__(self, apply: Callable[[ModelOutput], dict[str, Tensor]]) -> None:
        """`apply` gives the shares of the loss, under `loss`, and of the metrics."""
        self._apply = apply
        self.shares: dict[str, Tensor] | None = None
        """Shares that `apply` gave, the loss with gradient; None until the head has made it."""

    def score(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: PackedRows,
        wanted: EngineConfig,
        *,
        softcap: float | None = None,
        vocab_start: int = 0,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> ModelOutput:
        """Scores of the completion tokens of `rows`, and the loss; see `rl_csrc.linear_loss` for the arguments."""

        def loss(token_logprobs: Tensor, entropy: Tensor | None) -> Tensor:
            self.shares = self._apply(rows.output(token_logprobs=token_logprobs, entropy=entropy))
            return self.shares["loss"]

        found = linear_loss(
            hidden,
            weight,
            rows.labels,
            loss,
            temperature=wanted.temperature,
            softcap=softcap,
            entropy=wanted.entropy,
            vocab_start=vocab_start,
            gather=gather,
        )
        assert self.shares is not None
        self.shares["loss"] = found.loss
        return rows.output(token_logprobs=found.logprobs, entropy=found.entropy)


def head_loss_obstacle(config: EngineConfig) -> str | None:
    """Setting that keeps a head from making a loss itself; None without one."""
    if config.head != Head.LM:
        return f"head is {config.head}, which makes no logits"
    for name in ("sum_pi_squared", "num_candidates"):
        if value := getattr(config, name):
            return f"{name} is {value}, which the head is asked for as well"
    for name in ("sp", "cp"):
        if (size := getattr(config.parallel, name)) > 1:
            return f"parallel.{name} is {size}, which cuts rows over ranks"
    return None


def score_values(values: Tensor, rows: PackedRows) -> ModelOutput:
    """`[C, 1]` outputs of a scalar head, in float32 or wider; copied, as FSDP wants its modules to give no views."""
    return rows.output(token_values=values[:, 0].to(torch.promote_types(values.dtype, torch.float32), copy=True))


def score_logits(logits: Tensor, rows: PackedRows, wanted: EngineConfig) -> ModelOutput:
    """Scores of the completion tokens of `rows` from `[C, V]` logits that are here anyway."""
    options: dict[str, Any] = {"temperature": wanted.temperature, "ignore_index": None}
    found = logprobs(logits, rows.labels, entropy=wanted.entropy, sum_pi_squared=wanted.sum_pi_squared, **options)
    return _with_candidates(_FromLogits(logits / wanted.temperature), found, rows, wanted)


def score_states(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: PackedRows,
    head: LinearHead,
    wanted: EngineConfig,
    head_loss: HeadLoss | None = None,
) -> ModelOutput:
    """Scores of the completion tokens of `rows` from the `[C, H]` states that predict them, logits not stored.

    Args:
        hidden: The states.
        weight: (V, H), of the head.
        bias: (V,), of the head.
        rows: Their `labels` are scored, and their `candidates` in the place of each.
        head: Steps of the head other than the product.
        wanted: Its temperature, entropy, sum_pi_squared and num_candidates say what to give.
        head_loss: Made here as well, where nothing but log-probs and entropies is wanted.
    """
    scale = head.scale
    scaled = hidden if scale == 1 else hidden * scale
    is_plain = bias is None and rows.candidates is None and head_loss_obstacle(wanted) is None
    if head_loss is not None and is_plain:
        return head_loss.score(scaled, weight, rows, wanted, softcap=head.softcap)
    found = linear_logprobs(
        scaled,
        weight,
        rows.labels,
        bias=None if bias is None else bias * scale,
        softcap=head.softcap,
        temperature=wanted.temperature,
        entropy=wanted.entropy,
        sum_pi_squared=wanted.sum_pi_squared,
        ignore_index=None,
    )
    return _with_candidates(_FromStates(hidden, weight, bias, head, wanted.temperature), found, rows, wanted)


def _with_candidates(
    lookup: _FromLogits | _FromStates, found: LogProbs, rows: PackedRows, wanted: EngineConfig
) -> ModelOutput:
    asked = token_ids = likeliest = None
    if rows.candidates is not None:
        asked = lookup.of(torch.cat([rows.labels[:, None], rows.candidates], 1))
        asked = asked[:, 1:] - asked[:, :1] + found.logprobs[:, None]
    if wanted.num_candidates:
        token_ids, likeliest = lookup.likeliest(wanted.num_candidates)
    return rows.output(
        token_logprobs=found.logprobs,
        entropy=found.entropy,
        sum_pi_squared=found.sum_pi_squared,
        token_candidate_logprobs=asked,
        top_token_ids=token_ids,
        top_logprobs=likeliest,
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
    """The same of tokens whose logits are not stored: a few rows of the head each, or a chunk of tokens at a time."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: LinearHead, temperature: float
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._head, self._temperature = head, temperature

    def of(self, token_ids: Tensor) -> Tensor:
        """(C, K) logits, with gradient; `C * K * H` numbers are gathered."""
        logits = torch.einsum("ch,ckh->ck", self._hidden, self._weight[token_ids])
        return self._final(logits if self._bias is None else logits + self._bias[token_ids])

    @torch.no_grad()
    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """(C, K) token ids and their log-probs, without gradient."""
        token_ids, values = [self._hidden.new_empty(0, count, dtype=torch.int64)], [self._hidden.new_empty(0, count)]
        for hidden in self._hidden.split(_CHUNK):
            found = self._logits(hidden).log_softmax(-1).topk(count, -1)
            token_ids.append(found.indices)
            values.append(found.values)
        return torch.cat(token_ids), torch.cat(values[1:] or values)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._final(torch.nn.functional.linear(hidden, self._weight, self._bias))

    def _final(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self._head.scale
        if (cap := self._head.softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits / self._temperature
