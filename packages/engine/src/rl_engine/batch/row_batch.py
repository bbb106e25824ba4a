"""A batch of ragged rows: checked once, then cut into micro-batches and packed without padding.

Legend: `B` rows, `C` completion tokens, `T` tokens fed to the model. Row i feeds its prompt and all but the last
token of its completion (which predicts nothing): `T = sum(prompt + completion - 1)`. A head that judges the state
*after* a token is fed that one too (`feeds_last`). Tokens that rows begin with in common may be fed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rl_csrc import digest
from rl_csrc.inference.audio import AUDIO, LENGTHS
from rl_engine.batch.micro_batches import Load
from rl_engine.batch.packed import NO_COUNTS, PackedRows, share_prefixes, to_device
from rl_engine.batch.prefix_tree import prefix_tree, unshared
from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.prefix_tree import PrefixTree
    from rl_engine.types import BatchCounts

PROMPT = "prompt_token_ids"
COMPLETION = "completion_token_ids"
MASK = "loss_mask"
PAIR = "pair_id"
CHOSEN = "is_chosen"
ROUTED = "routed_experts"
CANDIDATES = "candidate_token_ids"
TARGETS = "target_token_ids"
ADAPTER = "adapter"
_VIDEOS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
VISUAL = (
    "pixel_values",
    "image_grid_thw",
    "image_sizes",
    *AUDIO,
    *_VIDEOS,
)
"""Columns of images, sounds and videos, under the names that Hugging Face processors give them."""


@dataclass(frozen=True, slots=True)
class _Ragged:
    """A jagged column taken apart."""

    values: Tensor
    offsets: Tensor
    """On the CPU, where micro-batches are laid out: nothing waits for the device in between."""


class RowBatch:
    """This rank's rows of one logical batch, on the engine's device."""

    def __init__(
        self,
        data: TensorDict,
        *,
        needs_mask: bool,
        device: torch.device,
        feeds_last: bool = False,
        shares_prefixes: bool = False,
    ) -> None:
        """Take `data` apart; columns stay as they are given.

        Args:
            data: Columns by name.
            needs_mask: Whether a loss is to read them.
            device: Where they go.
            feeds_last: Whether the model is fed a row's last token.
            shares_prefixes: Whether it is fed tokens once that rows of a micro-batch begin with.

        Raises:
            BatchError: a column is missing, not ragged, empty in some row, or not aligned with the completion.
        """
        wanted = [PROMPT, COMPLETION, MASK] if needs_mask else [PROMPT, COMPLETION]
        names = sorted(map(str, data.keys()))
        missing = [name for name in wanted if name not in names]
        if missing:
            raise BatchError(f"The batch lacks {', '.join(missing)}; it has {', '.join(names)}.")
        self.num_rows = int(data.batch_size[0]) if data.batch_size else 0
        self._columns = {name: _take_apart(name, data.get(name), device) for name in names}
        self._prompt = self._ragged(PROMPT)
        self._completion = self._ragged(COMPLETION)
        self._prompt_lengths = self._prompt.offsets.diff()
        self._completion_lengths = self._completion.offsets.diff()
        prompts, completions = self._prompt_lengths.tolist(), self._completion_lengths.tolist()
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if prompt < 1 or completion < 1:
                raise BatchError(
                    f"Row {row} has {prompt} prompt and {completion} completion tokens; at least one of each is needed."
                )
        self._prompts, self._completions = prompts, completions
        self._lengths = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        self._unfed = 0 if feeds_last else 1
        if MASK in names and not torch.equal(self._ragged(MASK).offsets.diff(), self._completion_lengths):
            raise BatchError(
                f"{MASK} and {COMPLETION} have rows of different lengths; a mask entry belongs to each token."
            )
        if TARGETS in names and not torch.equal(self._ragged(TARGETS).offsets.diff(), self._completion_lengths):
            raise BatchError(
                f"{TARGETS} and {COMPLETION} have rows of different lengths; one is scored for each token."
            )
        self._units = _units_of(self._columns, self.num_rows, needs_pairs=needs_mask)
        adapters = self._columns.get(ADAPTER)
        self.adapters: list[int] | None = adapters.tolist() if isinstance(adapters, Tensor) else None
        """Number of each row's adapter; None without the column."""
        self._places: _Ragged | None = None
        self._shares = shares_prefixes
        self._tree = self._prefix_tree() if shares_prefixes else unshared(self.num_rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, prompt and completion."""
        return list(self._lengths)

    @property
    def device(self) -> torch.device:
        """Device of the columns."""
        return self._completion.values.device

    def tokens(self) -> Load:
        """Tokens of rows, prompt and completion."""
        return Load(alone=self._lengths, prefix=lambda _, depth: depth, tree=self._tree)

    def costs(self, model: CostModel) -> Load:
        """Work of rows."""
        both = zip(self._lengths, self._completions, strict=True)
        return Load(
            alone=[model(length - self._unfed, scored) for length, scored in both],
            prefix=lambda row, depth: model(depth, max(0, depth - self._prompts[row])),
            tree=self._tree,
        )

    def _prefix_tree(self) -> PrefixTree:
        parts = zip(
            self._prompt.values.cpu().split(self._prompts),
            self._completion.values.cpu().split(self._completions),
            strict=True,
        )
        whole = [torch.cat(part) for part in parts]
        if any(name in self._columns for name in VISUAL):
            whole = _distinguished(whole, self._columns, self._prompts)
        rows = [row.numpy()[: size - self._unfed] for row, size in zip(whole, self._lengths, strict=True)]
        return prefix_tree(rows, self._prompts)

    @property
    def completion_offsets(self) -> Tensor:
        """(B + 1,) int64 row offsets into the completion tokens, as given."""
        return self._completion.offsets

    def units(self) -> list[list[int]]:
        """Rows that share a `pair_id`, in order of first appearance; without that column every row by itself."""
        return self._units

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids outside the model's vocabulary.

        Raises:
            BatchError: names the column, the id and the vocabulary size.
        """
        found = {PROMPT: self._prompt.values, COMPLETION: self._completion.values}
        if CANDIDATES in self._columns:
            found[CANDIDATES] = self.candidates()
        if TARGETS in self._columns:
            found[TARGETS] = self._ragged(TARGETS).values
        for name, values in found.items():
            if values.numel() == 0:
                continue
            low, high = (int(value) for value in values.aminmax())
            if low < 0 or high >= vocab_size:
                bad = low if low < 0 else high
                raise BatchError(f"{name} holds token id {bad}; the model's vocabulary has {vocab_size} entries.")

    def counts(self) -> tuple[float, float]:
        """Masked completion tokens, and rows with at least one; without a mask every completion token counts."""
        mask = self._columns.get(MASK)
        if not isinstance(mask, _Ragged):
            return float(self._completion.values.numel()), float(self.num_rows)
        weights = mask.values.to(torch.float64)
        per_row = torch.zeros(self.num_rows, dtype=torch.float64, device=weights.device)
        per_row.index_add_(0, self._here(_row_of(mask.offsets.diff())), weights)
        totals = torch.stack([weights.sum(), (per_row > 0).sum().to(torch.float64)]).tolist()
        return totals[0], totals[1]

    def select(self, rows: Sequence[int]) -> TensorDict:
        """Every column's given rows, in that order. Jagged columns of equal lengths share their offsets."""
        index = torch.tensor(rows, dtype=torch.int64)
        here = self._here(index)
        selected: dict[str, object] = {}
        shared: list[tuple[Tensor, Tensor, Tensor]] = []  # (source offsets, token index, offsets)
        for name, column in self._columns.items():
            if isinstance(column, _Ragged):
                found = next(
                    (each for each in shared if each[0] is column.offsets or torch.equal(each[0], column.offsets)), None
                )
                if found is None:
                    new_tokens, new_offsets = _token_index(column.offsets, index)
                    found = (column.offsets, self._here(new_tokens), self._here(new_offsets))
                    shared.append(found)
                _, tokens, offsets = found
                selected[name] = torch.nested.nested_tensor_from_jagged(column.values[tokens], offsets)
            elif isinstance(column, Tensor):
                selected[name] = column[here]
            else:
                selected[name] = NonTensorStack(*[column[row] for row in rows])
        return TensorDict(selected, batch_size=[len(rows)])  # pyright: ignore[reportArgumentType]

    def has(self, name: str) -> bool:
        """Whether there is such a column."""
        return name in self._columns

    def candidates(self) -> Tensor:
        """(completion tokens, K) int64, the column's values.

        Raises:
            BatchError: rows are not aligned with the completion, or entries are not K token ids.
        """
        column = self._ragged(CANDIDATES)
        if column.values.ndim != 2 or not torch.equal(column.offsets.diff(), self._completion_lengths):
            raise BatchError(f"{CANDIDATES} needs K token ids for each completion token: rows of shape (tokens, K).")
        return column.values

    def routed_experts(self) -> Tensor | None:
        """(tokens fed, layers, experts of a token), the column's values; None without it.

        Raises:
            BatchError: a row does not have one entry for each token that is fed.
        """
        if ROUTED not in self._columns:
            return None
        column = self._ragged(ROUTED)
        fed = [length - self._unfed for length in self._lengths]
        for row, (found, wanted) in enumerate(zip(column.offsets.diff().tolist(), fed, strict=True)):
            if found != wanted:
                raise BatchError(
                    f"Row {row} has {wanted} tokens that the model is fed and {found} entries of {ROUTED}; "
                    "one belongs to each (prompt and completion without the last token)."
                )
        return column.values

    def ragged(self, name: str) -> tuple[Tensor, Tensor]:
        """Values of a ragged column, and (B,) int64 how many of them each row has.

        Raises:
            BatchError: the column is not ragged.
        """
        column = self._ragged(name)
        return column.values, self._here(column.offsets.diff())

    def count_given(self, token_id: int) -> Tensor:
        """(B,) int64, how often a token occurs in each row that the model did not write."""
        counts = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        for column, values in ((self._prompt, self._prompt.values), (self._completion, self._given())):
            row_of = self._here(_row_of(column.offsets.diff()))
            counts.index_add_(0, row_of, (values == token_id).to(torch.int64))
        return counts

    def place(self, positions: Tensor) -> None:
        """Give every token that is fed, row by row, (time, height, width): (T, 3) int64 on the CPU."""
        fed = torch.tensor([length - self._unfed for length in self._lengths], dtype=torch.int64)
        self._places = _Ragged(self._here(positions), _offsets(fed))

    def _given(self) -> Tensor:
        """(C,) completion tokens, -1 where the model wrote them."""
        if MASK not in self._columns:
            return self._completion.values
        return self._completion.values.masked_fill(self._ragged(MASK).values != 0, -1)

    def _entries(self, name: str, rows: Tensor) -> Tensor | None:
        """A ragged column's values of the given rows, end to end; None without the column."""
        return self._values(self._ragged(name), rows) if name in self._columns else None

    def _values(self, column: _Ragged, rows: Tensor) -> Tensor:
        return column.values[self._here(_token_index(column.offsets, rows)[0])]

    def pack(self, rows: Sequence[int], counts: BatchCounts = NO_COUNTS) -> PackedRows:
        """The given rows as the model is fed them, with the `counts` of the whole batch."""
        packed = self.lay_out(rows, counts)
        if not self._shares:
            return packed
        return share_prefixes(packed, self._tree, rows, merges_scores=not {TARGETS, CANDIDATES} & self._columns.keys())

    def lay_out(self, rows: Sequence[int], counts: BatchCounts = NO_COUNTS) -> PackedRows:
        """The given rows end to end, each whole."""
        index = torch.tensor(rows, dtype=torch.int64)
        prompts, completions = self._prompt_lengths[index], self._completion_lengths[index]
        fed = prompts + completions - self._unfed
        starts = _offsets(fed)
        found, cu_seqlens = _token_index(self._completion.offsets, index)
        prompt_tokens, _ = _token_index(self._prompt.offsets, index)
        own_index = _positions(completions) + (starts[:-1] + prompts).repeat_interleave(completions)
        prompt_index = _positions(prompts) + starts[:-1].repeat_interleave(prompts)
        lengths = tuple(self._lengths[row] - self._unfed for row in rows)
        completion_tokens = self._here(found)
        completion_ids = self._completion.values[completion_tokens]
        prompt_ids = self._prompt.values[self._here(prompt_tokens)]

        def fed_of(completion: Tensor) -> Tensor:
            token_ids = completion_ids.new_empty(sum(lengths) + 1)
            # The last token of a row that is not fed it lands on its neighbour's first slot (or on the spare one at
            # the end), which that row's prompt then overwrites.
            token_ids[self._here(own_index)] = completion
            token_ids[self._here(prompt_index)] = prompt_ids
            return token_ids[:-1]

        visual = {name: found for name in VISUAL if (found := self._entries(name, index)) is not None}
        return PackedRows(
            token_ids=fed_of(completion_ids),
            position_ids=self._here(_positions(fed)),
            lengths=lengths,
            score_index=self._here(own_index - self._unfed),
            labels=self._ragged(TARGETS).values[completion_tokens] if TARGETS in self._columns else completion_ids,
            cu_seqlens=self._here(cu_seqlens),
            completions=tuple(self._completions[row] for row in rows),
            num_valid=sum(lengths),
            routed_experts=None if (routed := self._entries(ROUTED, index)) is None else routed.to(torch.int64),
            candidates=self.candidates()[completion_tokens] if CANDIDATES in self._columns else None,
            visual=visual,
            sounds=tuple(self._ragged(LENGTHS).offsets.diff()[index].tolist()) if LENGTHS in visual else (),
            adapters=None if self.adapters is None else tuple(self.adapters[row] for row in rows),
            places=None if self._places is None else self._values(self._places, index),
            given_ids=fed_of(self._given()[completion_tokens]) if visual else None,
            counts=counts,
        )

    def restore(self, rows: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """Per-token results of `rows`, micro-batch by micro-batch, as a jagged column in the order of the batch."""
        values = torch.cat([part.to(self.device) for part in parts])
        tokens, _ = _token_index(self._completion.offsets, torch.tensor(rows, dtype=torch.int64))
        restored = torch.empty_like(values)
        restored[self._here(tokens)] = values
        return torch.nested.nested_tensor_from_jagged(restored, self._here(self._completion.offsets))

    def _here(self, index: Tensor) -> Tensor:
        return to_device(index, self.device)

    def _ragged(self, name: str) -> _Ragged:
        column = self._columns[name]
        if not isinstance(column, _Ragged):
            raise BatchError(
                f"Column {name} is not ragged; make it with torch.nested.nested_tensor(rows, layout=jagged)."
            )
        return column


def _distinguished(
    rows: Sequence[Tensor], columns: Mapping[str, _Ragged | Tensor | list[object]], prompts: Sequence[int]
) -> list[Tensor]:
    """Numbers in the place of rows' tokens, equal where the token is, who wrote it, and all images of the row.

    A row with a video has numbers of its own.
    """
    ragged = {name: column for name, column in columns.items() if isinstance(column, _Ragged)}
    pieces = {
        name: ragged[name].values.split(ragged[name].offsets.diff().tolist())
        for name in (*VISUAL, MASK)
        if name in ragged
    }
    masks = pieces.pop(MASK, None)
    seen: dict[object, int] = {}
    keys = list[Tensor]()
    for index, row in enumerate(rows):
        has_video = any(len(entries[index]) for name, entries in pieces.items() if name in _VIDEOS)
        shown = index if has_video else tuple(digest(entries[index]) for entries in pieces.values())
        key = row + (seen.setdefault(shown, len(seen)) << 33)
        if masks is not None:
            key[prompts[index] :] += (masks[index].cpu() != 0).to(torch.int64) << 32
        keys.append(key)
    found: Tensor = torch.cat(keys).unique(return_inverse=True)[1] if keys else torch.empty(0)
    return list(found.split([len(row) for row in rows]))


def _units_of(columns: Mapping[str, object], num_rows: int, *, needs_pairs: bool) -> list[list[int]]:
    """See `RowBatch.units`; where a loss is to read them, every pair must be there.

    Raises:
        BatchError: `pair_id`, `is_chosen` or `adapter` is not one entry per row, or a pair is not one of each.
    """
    for name in (PAIR, CHOSEN, ADAPTER):
        column = columns.get(name)
        if column is not None and not (isinstance(column, Tensor) and column.shape == (num_rows,)):
            raise BatchError(f"Column {name} must have one entry per row, shape (B,).")
    pairs, chosen = columns.get(PAIR), columns.get(CHOSEN)
    if not isinstance(pairs, Tensor):
        return [[row] for row in range(num_rows)]
    if pairs.is_floating_point():
        raise BatchError(f"Column {PAIR} must be one whole number per row, shape (B,).")
    units: dict[int, list[int]] = {}
    for row, pair in enumerate(pairs.tolist()):
        units.setdefault(pair, []).append(row)
    if needs_pairs and isinstance(chosen, Tensor):
        is_chosen = chosen.bool().tolist()
        for pair, rows in units.items():
            good = sum(is_chosen[row] for row in rows)
            if (good, len(rows)) != (1, 2):
                raise BatchError(
                    f"{PAIR} {pair} has {good} rows with {CHOSEN} and {len(rows) - good} without; a pair is one of "
                    "each."
                )
    return list(units.values())


def _take_apart(name: str, column: object, device: torch.device) -> _Ragged | Tensor | list[object]:
    if isinstance(column, NonTensorStack):
        return column.tolist()
    if not isinstance(column, Tensor):
        raise BatchError(f"Column {name} is a {type(column).__name__}; a batch holds tensors, or one value per row.")
    if not column.is_nested:
        return column.to(device)
    jagged: Any = column  # torch types no nested tensor
    if column.layout != torch.jagged or jagged.lengths() is not None:
        raise BatchError(
            f"Column {name} is a nested tensor with layout {column.layout} or holes; give it as jagged values."
        )
    return _Ragged(jagged.values().to(device), jagged.offsets().to(device="cpu", dtype=torch.int64))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _row_of(lengths: Tensor) -> Tensor:
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)


def _positions(lengths: Tensor) -> Tensor:
    """0, 1, ... within each row, end to end."""
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths, output_size=total)


def _token_index(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the given rows' tokens, and the new offsets."""
    lengths = offsets.diff()[rows]
    return _positions(lengths) + offsets[:-1][rows].repeat_interleave(lengths), _offsets(lengths)
