"""Attention by array operations: any backend, any shape, all T x T logits in memory."""

import jax
from jaxtyping import Array, Float

from ldm_jax.typing import TokensBT


def plain_attention(
  q_BTHC: Float[Array, "B T H C"],
  k_BTJC: Float[Array, "B T J C"],
  v_BTJC: Float[Array, "B T J C"],
  segment_ids_BT: TokensBT,
) -> Float[Array, "B T H C"]:
  """Softmax attention with logits and softmax in float32; see `attention`."""
  same_document = segment_ids_BT[:, None, :, None] == segment_ids_BT[:, None, None, :]
  return jax.nn.dot_product_attention(q_BTHC, k_BTJC, v_BTJC, mask=same_document, is_causal=True)
