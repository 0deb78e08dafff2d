"""Save and restore the state of numpy's global generator as one block of memory: 2 us instead of 0.1 to 0.2 ms.

`numpy.random.get_state` and `set_state` convert each of the 624 numbers of the Mersenne Twister by itself (numpy 2.4).
The address of its state is public (`bit_generator.ctypes.state_address`), what lies there is not documented: whether
it is the numbers and a position is compared with `get_state` before it is used. Otherwise, with another bit generator,
and with numpy before 1.24, `get_state` and `set_state` are called.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any, final

_NUM_WORDS = 624
"""Of the state of a Mersenne Twister; a position of 4 bytes follows them."""


@final
class NumpyState:
    """The state of `numpy.random`, for the memory of this process: no checkpoint holds it."""

    def __init__(self) -> None:
        self._random = sys.modules["numpy"].random
        find = getattr(self._random, "get_bit_generator", None)
        self._bits: Any = None if find is None else find()
        self._block: Any = None if self._bits is None else _block_of(self._bits)

    def take(self) -> Any:
        """Return the state. `put` must follow: a normal number that the generator holds is lost until then.

        Raises: RuntimeError: the program has replaced the bit generator.
        """
        random, block, bits = self._random, self._block, self._bits
        if bits is not None and random.get_bit_generator() is not bits:
            raise RuntimeError(
                "`numpy.random.set_bit_generator` was called while a prepared loader was read, so the generator has "
                "not the state of its epoch. Call it before the loop."
            )
        if block is None:
            return random.get_state(legacy=False)
        assert bits is not None
        with bits.lock:
            words = block.raw
        # Normal numbers are drawn in pairs, and the second is kept outside of the block. If there is none, two draws
        # use up a new pair.
        second = random.standard_normal()
        if block.raw == words:
            return words, second
        random.standard_normal()
        return words, None

    def put(self, state: Any) -> None:
        """Restore a state that `take` has returned."""
        if self._block is None:
            self._random.set_state(state)
            return
        words, second = state
        if second is not None:
            numbers = memoryview(words[: 4 * _NUM_WORDS]).cast("I").tolist()
            position = int.from_bytes(words[4 * _NUM_WORDS :], sys.byteorder)
            self._random.set_state(("MT19937", numbers, position, 1, second))
            return
        with self._bits.lock:
            self._block.raw = words


@lru_cache(maxsize=1)
def _block_of(bits: Any) -> Any:
    """The memory that holds the state of a bit generator, if it is a Mersenne Twister whose layout is known."""
    if bits.state["bit_generator"] != "MT19937":
        return None
    block = (ctypes.c_char * (4 * _NUM_WORDS + 4)).from_address(bits.ctypes.state_address)
    state = bits.state["state"]
    known = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return block if block.raw == known else None
