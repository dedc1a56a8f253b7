"""The decoder-only transformer: an explicit loop over layers that carries the streams."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from ldm_jax.cache import Cache, KeyValues, add_tokens, overflows
from ldm_jax.config import Config, ModelConfig
from ldm_jax.layers import Attention, Embedder, SwiGLU, dropout, rms_norm
from ldm_jax.mixers import make_mixer
from ldm_jax.mixers.base import KEPT
from ldm_jax.ops.attention import SPLASH_RESIDUALS, check_splash, splash_refusal
from ldm_jax.ops.depth_memory.forms import Form
from ldm_jax.sharding import check_divisible
from ldm_jax.typing import Dtype, PyTree, TokensBT


def _remat_policy(remat):
  policies = jax.checkpoint_policies
  if remat == "dots":
    # Running the attention kernel forward again would cost more than one array of [B, T, D].
    return policies.save_from_both_policies(
      policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SPLASH_RESIDUALS)
    )
  return policies.save_only_these_names(KEPT)


class Block(nn.Module):
  """One attention and one MLP sublayer, each inside a depth mixer.

  Attributes:
    packed: take and return streams as `DepthMixer.pack` makes them.
  """

  config: ModelConfig
  index: int
  dtype: Dtype
  packed: bool

  @nn.compact
  def __call__(
    self,
    streams: Any,
    positions: TokensBT,
    segment_ids: TokensBT,
    dropout_keys: Key[Array, " B"] | None,
    cache: tuple[KeyValues, Cache] | None,
  ) -> Any:
    """Carries the streams through both sublayers; with a cache also returns what attention does."""
    config = self.config
    attention = Attention(
      heads=config.heads,
      kv_heads=config.kv_heads or config.heads,
      qk_norm=config.qk_norm,
      rope_theta=config.rope_theta,
      dtype=self.dtype,
      form=config.attention,
      name="attention",
    )
    mlp = SwiGLU(config.mlp_width, self.dtype, name="mlp")
    norms = [rms_norm(self.dtype, f"{part}_norm") for part in ("attention", "mlp")]
    mixers = [
      make_mixer(config.mixer, 2 * self.index + side, config.sublayers, self.dtype, f"{part}_mixer")
      for side, part in enumerate(("attention", "mlp"))
    ]

    def drop(v, side):
      return dropout(v, config.dropout, dropout_keys, 2 * self.index + side + 1)

    layer = None

    def attend(h):
      nonlocal layer
      v = attention(norms[0](h), positions, segment_ids, cache)
      if cache is not None:
        v, layer = v
      return drop(v, 0)

    if self.packed:
      streams = mixers[0].unpack(streams)
    streams = mixers[0](streams, attend)
    streams = mixers[1](streams, lambda h: drop(mlp(norms[1](h)), 1))
    if self.packed:
      streams = mixers[1].pack(streams)
    return streams if cache is None else (streams, layer)


class TransformerLM(nn.Module):
  """A Llama-like language model whose residual connections are depth mixers.

  Attributes:
    config: shape of the network and choice of mixer.
    dtype: dtype of activations and matrix products.  Parameters are float32.
    remat: what each block recomputes in the backward pass: "none" keeps everything, "dots" keeps
      the outputs of weight products and what the attention kernel needs to go back (its output and
      logsumexp), "full" keeps only the streams between blocks, packed, and, where the gradient of a
      write needs them, the outputs of the two sublayers.
  """

  config: ModelConfig
  dtype: Dtype = jnp.float32
  remat: str = "none"

  @nn.compact
  def __call__(
    self,
    tokens: TokensBT,
    positions: TokensBT | None = None,
    segment_ids: TokensBT | None = None,
    dropout_keys: Key[Array, " B"] | None = None,
    cache: Cache | None = None,
  ) -> Float[Array, "B T padded_vocab_size"] | tuple[Float[Array, "B T padded_vocab_size"], Cache]:
    """Next-token logits.

    Args:
      tokens: int [B, T].
      positions: position of each token in its document; 0 … T−1 if not given.
      segment_ids: documents of a packed row, attention stays inside one; all the same if not given.
      dropout_keys: a random key for each row, to train with `config.dropout`; None drops nothing.
      cache: to decode, the tokens before these (`ldm_jax.cache.empty_cache` at first), to which
        they attend as if all were one input; `positions` must then be given, and segment id 0 is
        padding.

    Returns:
      float32 [B, T, vocab_size rounded up to 128]; the padding ids are at −1e9.  With a cache also
      the cache with the tokens in it, and logits that are NaN if they had no slots left.

    Raises:
      ValueError: if the cache has fewer than T slots, or comes without positions.
    """
    config = self.config
    if positions is None:
      if cache is not None:
        raise ValueError("tokens that go on from a cache need `positions`")
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    if segment_ids is None:
      segment_ids = jnp.ones_like(tokens)
    embedder = Embedder(
      config.vocab_size,
      config.padded_vocab_size,
      config.width,
      config.tie_embeddings,
      self.dtype,
      name="embedder",
    )
    last = config.sublayers
    output_mixer = make_mixer(config.mixer, last, last, self.dtype, "output_mixer")

    embeddings = dropout(embedder.encode(tokens), config.dropout, dropout_keys, 0)
    packed = self.remat != "none"
    block_class = nn.remat(Block, policy=_remat_policy(self.remat)) if packed else Block
    streams, layers = output_mixer.init_streams(embeddings), []
    filled = None if cache is None else add_tokens(cache, segment_ids)
    if packed:
      streams = output_mixer.pack(streams)
    for index in range(config.blocks):
      block = block_class(config, index, self.dtype, packed, name=f"block_{index}")
      own = None if filled is None else (filled.layers[index], filled)
      streams = block(streams, positions, segment_ids, dropout_keys, own)
      if filled is not None:
        streams, layer = streams
        layers.append(layer)
    if packed:
      streams = output_mixer.unpack(streams)
    x = output_mixer.read(streams)
    logits = embedder.decode(rms_norm(self.dtype, "final_norm")(x))
    if cache is None:
      return logits
    logits = jnp.where(overflows(cache, tokens.shape[1]), jnp.nan, logits)
    length = cache.length + tokens.shape[1]
    return logits, filled._replace(layers=tuple(layers), length=length)


def portable(model: TransformerLM) -> TransformerLM:
  """The same model to run forwards anywhere: in place of forms for TPUs, what can run is taken."""
  mixer, attention = model.config.mixer.form, model.config.attention
  return _in_forms(
    model,
    mixer="auto" if mixer == "kernel" else mixer,
    attention="auto" if attention == "splash" else attention,
  )


def plainest(model: TransformerLM) -> TransformerLM:
  """The same model in the forms that are traced fastest: for its parameters, which are alike."""
  return _in_forms(model, mixer="reference", attention="plain")


def _in_forms(model, mixer, attention):
  config = model.config
  mixer = dataclasses.replace(config.mixer, form=mixer)
  config = dataclasses.replace(config, mixer=mixer, attention=attention)
  return model.clone(config=config, remat="none")


def attention_form(config: Config, mesh: Mesh) -> tuple[str, str]:
  """The form of attention that a run on a mesh takes, and why it is not splash; "" if it is.

  Raises:
    InputError: if `model.attention` is splash and it cannot run: the reason and what to change.
  """
  model, rows = config.model, config.data.batch_size // config.train.accumulate
  shape = (rows, config.data.sequence_length, model.heads, model.width // model.heads)
  kv_heads, dtype = model.kv_heads or model.heads, config.train.compute_dtype
  case = (shape, kv_heads, dtype, mesh.abstract_mesh, mesh.devices.flat[0].platform)
  if model.attention == "splash":
    check_splash(*case)
  if model.attention == "plain":
    return "plain", "it was asked for"
  refusal = splash_refusal(*case)
  return ("plain", refusal) if refusal else ("splash", "")


def memory_form(config: Config, mesh: Mesh) -> Form | None:
  """The form of the depth memory that a run on a mesh takes; None for other mixers.

  Raises:
    InputError: if the form that is asked for cannot run: the reason and what to change.
  """
  model = config.model
  if model.mixer.kind != "ldm":
    return None
  dtype = jnp.dtype(config.train.compute_dtype)
  mixer = make_mixer(model.mixer, model.sublayers, model.sublayers, dtype, None)
  rows = config.data.batch_size // config.train.accumulate
  x = jax.ShapeDtypeStruct((rows, config.data.sequence_length, model.width), dtype)
  found = []
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.eval_shape(lambda x: found.append(mixer.chosen_form(x)), x)
  return found[0]


def check_mesh(config: Config, mesh: Mesh) -> None:
  """Refuses a run that a mesh cannot split, or one of whose forms cannot run on it.

  Raises:
    InputError: naming the setting and what to change.
  """
  check_divisible(config, mesh)
  attention_form(config, mesh)
  memory_form(config, mesh)


def parameter_count(params: PyTree) -> int:
  """Number of parameters in a tree of arrays or shapes, boxes included."""
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def mixer_parameter_count(params: PyTree) -> int:
  """How many of a `TransformerLM`'s parameters belong to its mixers: all it has more than PreLN."""
  return sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if any(str(getattr(key, "key", "")).endswith("_mixer") for key in path)
  )
