"""The layer for multi-token prediction of a transformers model, which transformers itself leaves out.

Legend: `T` tokens fed, `C` completion tokens, `H` hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_csrc import linear_logprobs
from rl_engine.checkpoint import hf_folder
from rl_engine.errors import ConfigError
from rl_engine.layers.packed_attention import LAYOUT_KWARG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from rl_engine.batch.packed import PackedRows


class MtpLayer:
    """Layer that predicts the token after the next (DeepSeek-V3, 2412.19437, section 2.2), and its loss.

    It is made without memory, inside the model and under the names of the folder: at `model.layers.N` behind the last
    layer (DeepSeek-V3, GLM-4.5), or at `mtp` (Qwen3-Next, Qwen3.5).

    Args:
        model: A transformers model.
        folder: Its folder.

    Raises:
        ConfigError: the folder has no such layer.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        names, config = hf_folder.mtp_names(folder), model.config.get_text_config()
        base: Any = model.base_model
        if not names:
            raise ConfigError(f"mtp is train and {folder} has no layer for multi-token prediction. Leave mtp out.")
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        like = max(index for index, kind in enumerate(kinds) if kind == "full_attention")
        with torch.device("meta"):
            layer: Any = type(base.layers[like])(config, like)
            wide, size = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False), config.hidden_size
            norms = [type(layer.input_layernorm)(size, eps=config.rms_norm_eps) for _ in range(3)]
        whole: Any = layer
        forward = layer.forward
        if names[0].startswith("mtp."):
            whole, forward, self.prefix = nn.Module(), layer, "mtp."
            parts = {"fc": wide, "norm": norms[2], "layers": nn.ModuleList([layer])}
            parts |= {"pre_fc_norm_embedding": norms[0], "pre_fc_norm_hidden": norms[1]}
            model.add_module("mtp", whole)
        else:
            self.prefix = f"model.layers.{config.num_hidden_layers}."
            parts = {"enorm": norms[0], "hnorm": norms[1], "eh_proj": wide}
            parts["shared_head"] = nn.ModuleDict({"norm": norms[2]})
            base.layers.append(layer)  # transformers runs the first `num_hidden_layers` of them
        for name, part in parts.items():
            whole.add_module(name, part)
        whole.forward = partial(_forward, norms, wide, forward)
        self._model, self._layer = model, whole.to(model.dtype)
        self.mask: Tensor | None = None
        """(C,) completion tokens of the next micro-batch that count; None: all."""
        self.share: Tensor | None = None
        """Share of the last micro-batch in the loss of the batch."""

    def run(self, hidden: Tensor, rows: PackedRows, arguments: dict[str, Any]) -> None:
        """Compute `share`: the loss of completion tokens, each from two tokens before.

        Gradients are of the layer alone: it is given `hidden`, embedding and head detached. A row's first completion
        token is left out where its prompt has one token.

        Args:
            hidden: `[1, T, H]`, the last of the model.
            rows: The micro-batch.
            arguments: The model's.
        """
        model: Any = self._model
        hidden, position_ids = hidden.detach(), arguments["position_ids"]
        table, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
        states = self._layer(
            functional.embedding(rows.token_ids.roll(-1), table)[None],
            hidden,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=model.base_model.rotary_emb(hidden, position_ids),
            **{LAYOUT_KWARG: arguments[LAYOUT_KWARG]},
        )
        is_counted = rows.position_ids[rows.score_index] > 0  # a token before the last one that is before it
        if self.mask is not None:
            is_counted = is_counted & self.mask.bool()
        found = linear_logprobs(states[0, (rows.score_index - 1).clamp(min=0)], head, rows.labels, ignore_index=None)
        self.share = -(found.logprobs * is_counted).sum() / (rows.counts.tokens or 1.0)


def _forward(
    norms: list[nn.Module],
    wide: nn.Module,
    layer: Callable[..., Tensor],
    embedded: Tensor,
    hidden: Tensor,
    **kwargs: Any,
) -> Tensor:
    """States `[1, T, H]`, of which the head makes logits of the token after the next."""
    return norms[2](layer(wide(torch.cat([norms[0](embedded), norms[1](hidden)], -1)), **kwargs))
