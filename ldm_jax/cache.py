"""What decoding keeps of the tokens so far: the keys and values of every attention.

Streams of depth mixers are per token, so nothing of them is kept: a decoding step is the network on
the new tokens alone, and only its attentions look back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ldm_jax.config import ModelConfig
from ldm_jax.ops.attention import cached_attention
from ldm_jax.typing import Dtype, TokensBT


class KeyValues(NamedTuple):
  """One attention's keys, rotated, and values [B, J, S, C], in the dtype of activations.

  Slots lie behind heads, as attention's products want them: otherwise every token of a batch would
  move all that is there.
  """

  keys: Float[Array, "B J S C"]
  values: Float[Array, "B J S C"]


class Cache(NamedTuple):
  """S slots for the tokens of each row, filled from the first one on.

  All rows have their next token in the same slot, so shorter texts are padded on the left: with
  tokens of segment id 0, which no token of another segment attends to.

  layers: of each block.
  segment_ids: int32 [B, S] of the tokens in the slots; 0 for padding and where nothing is yet.
  length: int32 [], filled slots.
  """

  layers: tuple[KeyValues, ...]
  segment_ids: Int[Array, "B S"]
  length: Int[Array, ""]

  @property
  def slots(self) -> int:
    """S."""
    return self.segment_ids.shape[1]


def empty_cache(config: ModelConfig, rows: int, slots: int, dtype: Dtype) -> Cache:
  """A cache without tokens.

  Args:
    config: of the model.
    rows: B.
    slots: S, the most tokens of a row, padding included.
    dtype: of the model's activations.
  """
  heads = config.kv_heads or config.heads
  shape = (rows, heads, slots, config.width // config.heads)
  layers = tuple(
    KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.blocks)
  )
  return Cache(layers, jnp.zeros((rows, slots), jnp.int32), jnp.zeros((), jnp.int32))


def add_tokens(cache: Cache, segment_ids: TokensBT) -> Cache:
  """The cache with the segment ids of the next T tokens, before any `attend` to them.

  `length` still counts the tokens before them: it moves on when all attentions have attended.

  Raises:
    ValueError: if T tokens do not fit into S slots.  What is filled already is seen by
      `overflows` alone.
  """
  if segment_ids.shape[1] > cache.slots:
    raise ValueError(f"{segment_ids.shape[1]} tokens for a cache of {cache.slots} slots")
  return cache._replace(segment_ids=_put(cache.segment_ids, segment_ids, cache.length))


def attend(
  layer: KeyValues,
  cache: Cache,
  q_BTHC: Float[Array, "B T H C"],
  k_BTJC: Float[Array, "B T J C"],
  v_BTJC: Float[Array, "B T J C"],
  segment_ids: TokensBT,
) -> tuple[Float[Array, "B T H C"], KeyValues]:
  """Puts keys and values of T tokens into one attention's slots; attends to all slots so far.

  Args:
    layer: of this attention.
    cache: after `add_tokens`.
    q_BTHC: queries, rotated.
    k_BTJC: keys, rotated.
    v_BTJC: values.
    segment_ids: of the T tokens.

  Returns:
    The mixed values, and the layer with the tokens in it.
  """
  layer = KeyValues(
    *(
      _put(slots, jnp.swapaxes(new_BTJC, 1, 2), cache.length, axis=2)
      for slots, new_BTJC in zip(layer, (k_BTJC, v_BTJC), strict=True)
    )
  )
  mixed = cached_attention(q_BTHC, *layer, segment_ids, cache.segment_ids, cache.length)
  return mixed, layer


def overflows(cache: Cache, tokens: int) -> jax.Array:
  """Whether so many more tokens would not fit, bool []: writing them would overwrite others."""
  return cache.length + tokens > cache.slots


def _put(slots, new, start, axis=1):
  return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis)
