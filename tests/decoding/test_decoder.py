"""Ids from prompts: greedy choices, batches, lengths, the end, and how often programs compile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax import TransformerLM
from ldm_jax.config import MeshConfig
from ldm_jax.decoding import GREEDY, Decoder, Sampling, decoder
from ldm_jax.errors import InputError
from ldm_jax.sharding import make_mesh
from ldm_jax.training.step import abstract_state
from tests.rig import MECHANISMS, random_params, with_kind, with_model

PROMPT = [256, *b"def f(x"]


def make_decoder(name="preln", context=128, end=None, allowed=None, **changes):
  model = TransformerLM(with_model(with_kind(name), **changes).model)
  return Decoder(model, random_params(model), context, end, allowed)


@pytest.fixture(scope="module")
def tiny():
  return make_decoder(blocks=1)


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=() if name == "rls" else pytest.mark.slow) for name in MECHANISMS],
)
def test_greedy_ids_are_those_of_the_full_forward_pass(name):
  decode, ids = make_decoder(name, blocks=1), list(PROMPT)
  full = jax.jit(lambda tokens: decode.model.apply({"params": decode.params}, tokens))
  for _ in range(50):
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids)] = ids
    ids.append(int(jnp.argmax(full(row)[0, len(ids) - 1, :257])))
  assert decode.generate([PROMPT], 50, GREEDY) == [ids[len(PROMPT) :]]


def test_a_row_does_not_depend_on_the_rest_of_the_batch(tiny):
  prompts = [PROMPT, [256], PROMPT, [256, *b"a longer one"]]
  sampling = Sampling(1.0)
  together = tiny.generate(prompts, 20, sampling, seed=4)
  for number in (0, 3):
    others = [[256, 7]] * 4
    others[number] = prompts[number]
    assert tiny.generate(others, 20, sampling, seed=4)[number] == together[number]
  assert tiny.generate(prompts[:1], 20, sampling, seed=4) == together[:1]
  assert together[0] != together[2]
  assert tiny.generate([PROMPT], 20, sampling, seed=5) != together[:1]


def test_looks_show_the_same_ids_as_they_come(tiny):
  looks = [look.ids[0] for look in tiny.stream([PROMPT], 20, Sampling(1.0), stride=8)]
  assert [len(ids) for ids in looks] == [8, 16, 20]
  assert looks[0] == looks[2][:8]
  assert looks[2] == tiny.generate([PROMPT], 20, Sampling(1.0))[0]


class Counting(TransformerLM):
  """Predicts the next number."""

  def __call__(self, tokens, positions, segment_ids, dropout_keys, cache):
    logits = 1e3 * jax.nn.one_hot(tokens + 1, self.config.padded_vocab_size)
    return logits, cache._replace(length=cache.length + tokens.shape[1])


def test_each_text_ends_where_its_document_does(tiny):
  decode = Decoder(Counting(tiny.model.config), {"x": jnp.zeros(())}, 300, end=256)
  rows = decode.generate([[97], [250]], 200, Sampling(1.0))
  assert rows == [list(range(98, 256)), list(range(251, 256))]
  *_, look = decode.stream([[97], [250]], 10, Sampling(1.0))
  assert look.ids == [list(range(98, 108)), list(range(251, 256))]
  assert look.done == [False, True]


def test_padded_and_unknown_ids_never_come_out():
  allowed = np.arange(260) < 200
  allowed[5] = False
  decode = make_decoder(blocks=1, allowed=allowed, vocab_size=1000)
  rows = decode.generate([[1]] * 20, 100, Sampling(5.0))
  found = set(np.ravel(rows))
  assert len(found) > 150
  assert max(found) < 200
  assert 5 not in found


@pytest.mark.parametrize(
  ("prompt", "count", "message"),
  [
    (PROMPT, 122, r"--max-new-tokens 122: with a prompt of 7 tokens.*context of 128"),
    ([256] * 130, 1, "a prompt of 129 tokens"),
    (PROMPT, 0, "--max-new-tokens 0"),
    ([], 1, "no token"),
    ([257], 1, "a model of 257"),
  ],
)
def test_what_does_not_fit_is_refused(tiny, prompt, count, message):
  with pytest.raises(InputError, match=message):
    tiny.generate([[256], prompt], count)


def test_prompt_and_text_may_fill_the_context(tiny):
  (ids,) = tiny.generate([PROMPT], 121, GREEDY)
  assert len(ids) == 121


def test_programs_are_compiled_once_for_lengths_up_to_a_power_of_two(tiny):
  def compiled():
    return tuple(program._cache_size() for program in decoder.programs("cpu"))

  def generate(prompt, *arguments):
    tiny.generate([prompt] * 3, *arguments)

  generate(PROMPT, 20, Sampling(1.0))
  before = compiled()
  generate(PROMPT[:3], 17, Sampling(0.5), 3)
  generate(PROMPT * 2, 32, GREEDY)
  list(tiny.stream([PROMPT] * 3, 30, Sampling(2.0), stride=4))
  assert compiled() == before
  generate(PROMPT, 33, GREEDY)
  generate(PROMPT * 3, 20, GREEDY)
  assert compiled() == (before[0] + 2, before[1] + 2)


def test_a_long_prompt_goes_in_by_chunks(tiny, monkeypatch):
  prompt = [256, *range(60)]
  whole = tiny.generate([prompt, [256]], 8, GREEDY)
  monkeypatch.setattr(decoder, "_LARGEST_CHUNK", 16)
  assert tiny.generate([prompt, [256]], 8, GREEDY) == whole


@pytest.mark.parametrize(
  "form",
  ["kernel", *(pytest.param(form, marks=pytest.mark.slow) for form in ("history", "state"))],
)
def test_a_model_that_names_a_form_decodes_all_the_same(form):
  config = with_model(with_kind("rls"), blocks=1, attention="splash")
  mixer = dataclasses.replace(config.model.mixer, form=form)
  decode = make_decoder("rls", blocks=1)
  named = dataclasses.replace(
    decode, model=TransformerLM(dataclasses.replace(config.model, mixer=mixer), remat="full")
  )
  assert named.generate([PROMPT], 8, GREEDY) == decode.generate([PROMPT], 8, GREEDY)


@pytest.mark.parametrize(
  ("name", "shape", "rows"),
  [
    ("preln", (2, 2, 2, 1), 4),
    pytest.param("rls", (2, 2, 2, 1), 4, marks=pytest.mark.slow),
    pytest.param("rls", (8, 1, 1, 1), 1, marks=pytest.mark.slow),
    pytest.param("rls", (8, 1, 1, 1), 8, marks=pytest.mark.slow),
    pytest.param("mhc", (1, 1, 2, 4), 1, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_any_mesh_gives_the_same_ids_and_compiles_once(name, shape, rows):
  config = with_model(with_kind(name), blocks=1)
  mesh = make_mesh(MeshConfig(*shape))
  alone = make_decoder(name, blocks=1)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(config, mesh).params)
  split = dataclasses.replace(alone, params=jax.device_put(alone.params, shardings))
  prompts = [PROMPT, [256], PROMPT[:3], [256]] * 2
  _, program = decoder.programs("cpu")
  before = program._cache_size()
  looks = [look.ids for look in split.stream(prompts[:rows], 12, GREEDY, stride=4)]
  assert program._cache_size() == before + 1
  assert looks[-1] == alone.generate(prompts[:rows], 12, GREEDY)
