"""Defines which tokens the stamped model generates, and its KV.

A KV cell holds a number that depends on all tokens up to its position, and on its layer, plane, head and dimension.
float32 represents this number exactly, so attending to a wrong, stale or missing cell is noticed at once. The next
token follows from the last stamp, so every run of the same prompt must generate the same tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BITS = 24  # float32 represents integers below 2^24 exactly
_MASK = (1 << _BITS) - 1
_WIDE = (1 << 64) - 1
VOCAB = 400
STOP_TOKENS = frozenset(range(31, VOCAB, 31))  # vLLM gets them as stop_token_ids


class BrokenError(Exception):
    """The harness found a violation; the message says which."""


def root_stamp(salt: str = "") -> int:
    """Returns the stamp before the first token. It differs for each LoRA and cache_salt."""
    stamp = 0x6B7666657272
    for char in salt:
        stamp = next_stamp(stamp, ord(char))
    return stamp


def next_stamp(before: int, token: int) -> int:
    z = (before + 0x9E3779B97F4A7C15 * (token + 1)) & _WIDE
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WIDE
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WIDE
    return z ^ (z >> 31)


def next_token(stamp: int) -> int:
    """Returns the token that the model generates after a prefix with this stamp."""
    return 1 + (stamp >> 20) % (VOCAB - 1)


def continuation(prompt: Sequence[int], count: int, salt: str = "", stops: bool = False) -> list[int]:
    """Returns the tokens that the model must generate after the prompt."""
    stamp = root_stamp(salt)
    for token in prompt:
        stamp = next_stamp(stamp, token)
    said: list[int] = []
    while len(said) < count and not (stops and said and said[-1] in STOP_TOKENS):
        said.append(next_token(stamp))
        stamp = next_stamp(stamp, said[-1])
    return said


class Text:
    """The runner's tokens of one request, and the KV cells of each position."""

    def __init__(self, tokens: Sequence[int], salt: str, cell_factors: NDArray[np.int64]) -> None:
        self._factors = cell_factors
        self._root = root_stamp(salt)
        self.tokens: list[int] = []
        self._stamps: list[int] = []
        self._cells = np.empty((64, cell_factors.size), dtype=np.float32)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        stamp = self._stamps[-1] if self._stamps else self._root
        for token in tokens:
            stamp = next_stamp(stamp, token)
            self.tokens.append(token)
            self._stamps.append(stamp)
        while len(self.tokens) > len(self._cells):
            self._cells = np.concatenate([self._cells, np.empty_like(self._cells)])
        low = np.array([stamp & _MASK for stamp in self._stamps[start:]], dtype=np.int64)
        self._cells[start:len(self.tokens)] = (low[:, None] * self._factors + self._factors) & _MASK

    def truncate(self, count: int) -> None:
        del self.tokens[count:], self._stamps[count:]

    def cells(self, start: int, end: int) -> NDArray[np.float32]:
        """Returns the cells [position, cell] of the positions start .. end - 1."""
        return self._cells[start:end]

    def says(self, end: int) -> int:
        """Returns the token that the model generates after the first `end` tokens."""
        return next_token(self._stamps[end - 1])


class StampedMemory:
    """The KV tensors of all layers, with one view of all K and one of all V: [layer, block, head, token, dim]."""

    def __init__(self, planes: list[NDArray[np.float32]], block_tokens: int, ranks: int = 1, interleave: int = 1
                 ) -> None:  # fmt: skip
        """`ranks`: the number of decode context parallel ranks, of which each has an equal share of the blocks in
        `planes`, one rank's after the other's. They get the tokens of a block in turns of `interleave` tokens.
        """
        self._planes = planes
        self._ranks, self._interleave = ranks, interleave
        self.block_tokens = block_tokens * ranks  # on all ranks together
        layers, _, heads, _, dims = planes[0].shape
        self._cell_shape = (len(planes), layers, heads, dims)
        # The factors are odd and different for each cell of a token, so that swapped cells are noticed.
        self.cell_factors = np.arange(1, 2 * int(np.prod(self._cell_shape)), 2, dtype=np.int64) * 7919

    def _at(self, table: Sequence[int], start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start, end)
        blocks = np.asarray(table, dtype=np.int64)
        index = positions // self.block_tokens
        if end > start and (index[-1] >= len(blocks) or (blocks[index] <= 0).any()):
            raise BrokenError(f"positions {start} to {end} have no blocks in {list(table)}")
        turn, place = np.divmod(positions % self.block_tokens, self._interleave)
        own_blocks = self._planes[0].shape[1] // self._ranks
        return blocks[index] + turn % self._ranks * own_blocks, turn // self._ranks * self._interleave + place

    def write(self, table: Sequence[int], start: int, cells: NDArray[np.float32], first_layer: int = 0) -> None:
        blocks, offsets = self._at(table, start, start + len(cells))
        shaped = cells.reshape(-1, *self._cell_shape)
        for plane, view in enumerate(self._planes):
            view[first_layer:, blocks, :, offsets, :] = shaped[:, plane, first_layer:]

    def first_wrong(self, table: Sequence[int], cells: NDArray[np.float32]) -> int | None:
        """Returns the first position whose cells are wrong, or None."""
        blocks, offsets = self._at(table, 0, len(cells))
        shaped = cells.reshape(-1, *self._cell_shape)
        wrong = np.zeros(len(cells), dtype=bool)
        for plane, view in enumerate(self._planes):
            held = view[:, blocks, :, offsets, :]
            if not np.array_equal(held, shaped[:, plane]):
                wrong |= (held != shaped[:, plane]).any(axis=(1, 2, 3))
        return int(np.argmax(wrong)) if wrong.any() else None
