"""Causal grouped-query attention within documents, in interchangeable forms.

from ldm_jax.ops.attention import attention

mixed_BTHC = attention(q_BTHC, k_BTJC, v_BTJC, segment_ids_BT)
"""

from ldm_jax.ops.attention.api import attention, check_splash, splash_refusal
from ldm_jax.ops.attention.cached import cached_attention
from ldm_jax.ops.attention.plain import plain_attention
from ldm_jax.ops.attention.splash import SPLASH_RESIDUALS, splash_attention

__all__ = [
  "SPLASH_RESIDUALS",
  "attention",
  "cached_attention",
  "check_splash",
  "plain_attention",
  "splash_attention",
  "splash_refusal",
]
