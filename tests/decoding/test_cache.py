"""Decoding with the cache is the full forward pass, token by token or in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax import TransformerLM
from ldm_jax.cache import empty_cache
from tests.rig import MECHANISMS, VARIANTS, random_params, with_kind, with_model

SLOTS = 24


@functools.partial(jax.jit, static_argnums=0)
def full(model, params, tokens):
  return model.apply({"params": params}, tokens)


@functools.partial(jax.jit, static_argnums=0)
def extend(model, params, cache, tokens, positions, segment_ids):
  return model.apply({"params": params}, tokens, positions, segment_ids, None, cache)


def setup(name, **changes):
  model = TransformerLM(with_model(with_kind(name), **changes).model)
  rng = np.random.default_rng(0)
  return model, random_params(model), jnp.asarray(rng.integers(0, 257, (2, 20)), jnp.int32)


def cached_logits(model, params, tokens, chunks, pads=0):
  """Logits of all tokens, given in chunks of these sizes behind `pads` slots of padding."""
  cache = empty_cache(model.config, len(tokens), SLOTS, jnp.float32)
  for _ in range(pads):
    zeros = jnp.zeros((len(tokens), 1), jnp.int32)
    _, cache = extend(model, params, cache, zeros, zeros, zeros)
  logits, start = [], 0
  for size in chunks:
    part = tokens[:, start : start + size]
    positions = jnp.broadcast_to(jnp.arange(start, start + size)[None], part.shape)
    found, cache = extend(model, params, cache, part, positions, jnp.ones_like(part))
    logits.append(found)
    start += size
  return jnp.concatenate(logits, axis=1)


@pytest.mark.parametrize(
  ("name", "blocks"),
  [
    *((name, 1) for name in ("rls", "attnres", "mhc")),  # preln is below
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in VARIANTS),
  ],
)
def test_decoding_equals_the_full_forward_pass_at_every_position(name, blocks):
  model, params, tokens = setup(name, blocks=blocks)
  expected = full(model, params, tokens)
  for chunks in ([1] * 20, *([[16, 1, 1, 1, 1]] if blocks > 1 else [])):
    found = cached_logits(model, params, tokens, chunks)
    np.testing.assert_allclose(found[..., :257], expected[..., :257], atol=1e-4)
  assert jnp.abs(expected[..., :257]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("prompt", [2, 15, 16, 17])
def test_prompts_of_every_length_around_a_power_of_two(name, prompt):
  model, params, tokens = setup(name)
  expected = full(model, params, tokens)
  for chunks in ([prompt, 1, 1], [prompt - prompt // 2, prompt // 2, 1, 1]):
    found = cached_logits(model, params, tokens, chunks)
    np.testing.assert_allclose(
      found[..., :257], expected[:, : prompt + 2, :257], atol=1e-4, err_msg=str(chunks)
    )


@pytest.mark.slow
def test_grouped_heads_and_their_norm_decode_too():
  model, params, tokens = setup("preln", kv_heads=2, qk_norm=True, blocks=1)
  expected = full(model, params, tokens)
  found = cached_logits(model, params, tokens, [16, 1, 1, 1, 1])
  np.testing.assert_allclose(found[..., :257], expected[..., :257], atol=1e-4)


def test_padding_on_the_left_changes_nothing():
  model, params, tokens = setup("preln", blocks=1)
  padded = cached_logits(model, params, tokens, [16, 1, 1], pads=4)
  np.testing.assert_allclose(
    padded[..., :257], full(model, params, tokens)[:, :18, :257], atol=1e-4
  )


def test_slots_that_run_out_are_refused_or_poison_the_logits():
  model, params, tokens = setup("preln", blocks=1)
  cache = empty_cache(model.config, 2, SLOTS, jnp.float32)
  ones = jnp.ones((2, 16), jnp.int32)
  positions = jnp.cumsum(ones, axis=1) - 1
  logits, cache = extend(model, params, cache, tokens[:, :16], positions, ones)
  assert np.isfinite(logits).all()
  logits, _ = extend(model, params, cache, tokens[:, :16], positions, ones)
  assert np.isnan(logits).all()
  small = empty_cache(model.config, 2, 8, jnp.float32)
  with pytest.raises(ValueError, match="16 tokens for a cache of 8 slots"):
    extend(model, params, small, tokens[:, :16], positions, ones)
  with pytest.raises(ValueError, match="need `positions`"):
    model.apply({"params": params}, tokens, cache=cache)
