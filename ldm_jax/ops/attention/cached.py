"""Attention of new tokens to a cache of keys and values, for decoding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ldm_jax.typing import TokensBT


def cached_attention(
  q_BTHC: Float[Array, "B T H C"],
  k_BJSC: Float[Array, "B J S C"],
  v_BJSC: Float[Array, "B J S C"],
  segment_ids_BT: TokensBT,
  slot_ids_BS: Int[Array, "B S"],
  start: Int[Array, ""],
) -> Float[Array, "B T H C"]:
  """Softmax attention of T tokens, in slots `start` … `start` + T − 1 of the cache, to its S slots.

  A token attends to its own slot and the slots before it that carry its segment id; what slots
  after it hold has no influence.  Logits and softmax are float32, as in `attention`.

  Args:
    q_BTHC: queries of the new tokens.
    k_BJSC: keys of all slots, those of the new tokens included; J divides H.
    v_BJSC: values, likewise.
    segment_ids_BT: of the new tokens.
    slot_ids_BS: segment ids of all slots, the new ones included.
    start: int32, the slot of the first new token.

  Returns:
    The mixed values, in the dtype of q.
  """
  tokens, slots = q_BTHC.shape[1], k_BJSC.shape[2]
  before_TS = jnp.arange(slots)[None] <= start + jnp.arange(tokens)[:, None]
  same_BTS = segment_ids_BT[:, :, None] == slot_ids_BS[:, None]
  mask_B1TS = (before_TS[None] & same_BTS)[:, None]
  k_BSJC, v_BSJC = (jnp.swapaxes(x, 1, 2) for x in (k_BJSC, v_BJSC))
  return jax.nn.dot_product_attention(q_BTHC, k_BSJC, v_BSJC, mask=mask_B1TS)
