"""Attention, the choice of its form, and what the choice is made by."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float

from ldm_jax.errors import InputError
from ldm_jax.ops.attention.plain import plain_attention
from ldm_jax.ops.attention.splash import LANES, splash_attention
from ldm_jax.ops.program import is_own_mesh, mesh_refusal, program_of
from ldm_jax.sharding import RULES
from ldm_jax.typing import Dtype, TokensBT

_ONE_PASS = (None, "default", "fastest", "bfloat16")
# What Mosaic, the compiler of the kernel, has of JAX's default precisions.
_PRECISIONS = {"float32": (*_ONE_PASS, "highest", "float32"), "bfloat16": _ONE_PASS}


def attention(
  q_BTHC: Float[Array, "B T H C"],
  k_BTJC: Float[Array, "B T J C"],
  v_BTJC: Float[Array, "B T J C"],
  segment_ids_BT: TokensBT,
  form: str = "auto",
  *,
  interpret: bool = False,
) -> Float[Array, "B T H C"]:
  """Causal softmax attention of each token to those with its segment id, scaled by 1 / sqrt(C).

  Query head h attends to key/value head h // (H / J).  Logits, softmax and sums are float32
  whatever the dtype of the arguments.

  Args:
    q_BTHC: queries, float32 or bfloat16.
    k_BTJC: keys, same dtype; J divides H.
    v_BTJC: values, same dtype.
    segment_ids_BT: documents of a packed row; padding is a document of its own.
    form: "plain" holds all T x T logits; "splash" is JAX's flash kernel for TPUs, whose memory is
      linear in T; "auto" takes splash wherever `splash_refusal` has nothing against it, and plain
      elsewhere.
    interpret: run the kernel of splash in Pallas's interpreter, on any platform: slow, for tests.

  Returns:
    The mixed values, in the dtype of q.

  Raises:
    InputError: if `form` is "splash" and it cannot run here, saying why.
    ValueError: for another form.
  """
  if form not in ("auto", "plain", "splash"):
    raise ValueError(f"unknown form of attention {form!r}; known are auto, plain, splash")
  if form == "plain":
    return plain_attention(q_BTHC, k_BTJC, v_BTJC, segment_ids_BT)
  mesh, platform = program_of(q_BTHC, interpret=interpret)
  case = (q_BTHC.shape, k_BTJC.shape[2], q_BTHC.dtype, mesh, platform)
  if form == "splash":
    check_splash(*case)
  if splash_refusal(*case) is None:
    return splash_attention(q_BTHC, k_BTJC, v_BTJC, segment_ids_BT, mesh, interpret=interpret)
  return plain_attention(q_BTHC, k_BTJC, v_BTJC, segment_ids_BT)


def check_splash(
  shape: tuple[int, int, int, int], kv_heads: int, dtype: Dtype, mesh: AbstractMesh, platform: str
) -> None:
  """Refuses what splash cannot run, for those who asked for it; see `splash_refusal`.

  Raises:
    InputError: saying why, and what to change.
  """
  refusal = splash_refusal(shape, kv_heads, dtype, mesh, platform)
  if refusal is not None:
    raise InputError(f"model.attention = splash cannot run: {refusal}, or set it to auto or plain")


def splash_refusal(
  shape: tuple[int, int, int, int], kv_heads: int, dtype: Dtype, mesh: AbstractMesh, platform: str
) -> str | None:
  """Why splash cannot run, with what to change, or None if it can.

  It runs on TPUs, for sequence lengths that are a multiple of 128 on every device and any head
  width, where the mesh splits batch, heads and key/value heads evenly.  The mesh is this project's
  (`ldm_jax.sharding.make_mesh`), a single device, or one inside a user's own `shard_map`, where
  each device sees whole sequences.

  Args:
    shape: of the queries, (B, T, H, C).
    kv_heads: J.
    dtype: of queries, keys and values.
    mesh: that the program is compiled for; empty if there is none.
    platform: that the program is compiled for, such as "tpu".
  """
  if platform != "tpu":
    return f"it needs a TPU and the program is for {platform}; use a TPU"
  precision = jax.config.jax_default_matmul_precision
  if precision not in _PRECISIONS.get(jnp.dtype(dtype).name, ()):
    return (
      f"it has no products of {jnp.dtype(dtype).name} arrays at jax_default_matmul_precision = "
      f"{precision}; leave that unset"
    )
  refusal = mesh_refusal(mesh)
  if refusal is not None:
    return refusal
  batch, length, heads, _ = shape
  sizes = {
    "data.batch_size": (batch, "batch", 1),
    "data.sequence_length": (length, "sequence", LANES),
    "model.heads": (heads, "heads", 1),
    "model.kv_heads": (kv_heads, "kv_heads", 1),
  }
  for setting, (size, axis, unit) in sizes.items():
    axes = RULES[axis] if is_own_mesh(mesh) else ()
    if size % (unit * math.prod(mesh.shape[name] for name in axes)):
      names = " x ".join(([str(unit)] if unit > 1 else []) + [f"mesh.{name}" for name in axes])
      return f"{setting} = {size} is not a multiple of {names}; change one of them"
  return None
