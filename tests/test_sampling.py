import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from ldm_jax import TransformerLM
from ldm_jax.data import ByteTokenizer
from ldm_jax.sampling import sample
from tests.rig import MECHANISMS, tiny_config, with_kind

MODEL = TransformerLM(tiny_config("preln").model)
PARAMS = nn.unbox(MODEL.init(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))["params"])
# Sharper logits than an untrained model has, so that choices are not ties.
PARAMS["embedder"]["head_kernel"] = 50 * PARAMS["embedder"]["head_kernel"]


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=() if name == "attnres" else pytest.mark.slow) for name in MECHANISMS],
)
def test_temperature_zero_takes_the_most_likely_token_each_time(name):
  model = TransformerLM(with_kind(name).model)
  params = nn.unbox(jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))["params"])
  params["embedder"]["head_kernel"] = 50 * params["embedder"]["head_kernel"]
  ids = [256, *b"ab"]
  for _ in range(3):
    logits = model.apply({"params": params}, jnp.array([ids]))
    ids.append(int(jnp.argmax(logits[0, -1])))
  assert 256 not in ids[1:]
  text = sample(model, params, ByteTokenizer(), "ab", 3, temperature=0.0)
  assert text == ByteTokenizer().decode(ids)


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled():
  config = tiny_config("preln").model
  model = TransformerLM(dataclasses.replace(config, vocab_size=1000))
  params = nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"])
  text = sample(model, params, ByteTokenizer(), "a", 30, temperature=5.0)
  assert text.startswith("a")


def test_a_seed_gives_one_text_and_seeds_differ():
  texts = [sample(MODEL, PARAMS, ByteTokenizer(), "", 8, 1.0, seed=seed) for seed in (0, 0, 1)]
  assert texts[0] == texts[1] != texts[2]


class Counting(TransformerLM):
  """Predicts the next number, so 256, the boundary, comes after 255."""

  def __call__(self, tokens):
    return 1e3 * jax.nn.one_hot(tokens + 1, self.config.padded_vocab_size)


def test_the_text_ends_at_a_document_boundary():
  text = sample(Counting(MODEL.config), {}, ByteTokenizer(), "a", 200)
  assert text == ByteTokenizer().decode(range(97, 256))
