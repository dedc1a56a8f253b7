"""Operations on planes: arrays [B, D, T] whose tokens are last, so that they fill a TPU's lanes.

The width D is G contiguous groups of rows.  A number for each group and token, [B, G, T], is then
one row that stands for a group's many: coefficients are cheap where they meet planes.

out = weighted_sums(planes, weights_OPBGT, base)     # out_o = base_o + sum_p weights[o, p] plane_p
prod_OPBGT = group_products(left, right, groups)     # by group, left_o . right_p
outs = tokenwise(body, [k_KBGT, w_BGT])              # fused elementwise functions of such numbers
y_BRT, squares_B1T = thin_product(x_BDT, w_RD)       # w x and |x|^2 in one pass over x

`thin_products` and `sums_and_planes` do the same to planes that have further uses.
"""

from ldm_jax.ops.planes.api import group_products, weighted_sums
from ldm_jax.ops.planes.forms import planes_refusal, thin_refusal, tokenwise_refusal
from ldm_jax.ops.planes.handed import sums_and_planes, thin_products
from ldm_jax.ops.planes.thin import thin_product, thin_product_gradients
from ldm_jax.ops.planes.tokenwise import tokenwise
from ldm_jax.ops.planes.whole import (
  from_plane,
  place_plane,
  plane_weights,
  stream_refusal,
  takes_planes,
  to_plane,
)

__all__ = [
  "from_plane",
  "group_products",
  "place_plane",
  "plane_weights",
  "planes_refusal",
  "stream_refusal",
  "sums_and_planes",
  "takes_planes",
  "thin_product",
  "thin_product_gradients",
  "thin_products",
  "thin_refusal",
  "to_plane",
  "tokenwise",
  "tokenwise_refusal",
  "weighted_sums",
]
