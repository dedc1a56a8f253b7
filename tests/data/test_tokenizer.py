"""Text in is text out, the boundary id is never text, pieces encode as the whole."""

import dataclasses
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from ldm_jax.data import HuggingFaceTokenizer, load_tokenizer
from ldm_jax.data.encoding import DocumentEncoder, cut_between_words, encode_document
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import InputError
from tests.data.corpora import train_bpe

TEXTS = ["", "a", "def f(x):\n\treturn  x\n", "naïve 日本語 😀\0", " <|endoftext|> <|endoftext|>x"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return train_bpe(tmp_path_factory.mktemp("bpe") / "tok.json")


@pytest.fixture(scope="module")
def bpe(path):
  return load_tokenizer(path)


def test_bpe_round_trip_never_gives_the_boundary(bpe):
  assert (bpe.vocab_size, bpe.boundary, bpe.dtype) == (400, 0, np.uint16)
  for text in TEXTS:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.decode([bpe.boundary, *ids, bpe.boundary]) == text
    assert not (ids == bpe.boundary).any()
  assert not (bpe.encode("<|pad|>") == 1).any()
  assert len(bpe.encode("def def def")) < 11
  assert bpe.encode(b"\xff").tolist() == bpe.encode("\ufffd").tolist()


def test_a_boundary_that_is_no_special_token_is_encoded_as_letters(path):
  contents = json.loads(path.read_text())
  contents["added_tokens"][0]["special"] = False
  tokenizer = HuggingFaceTokenizer(json.dumps(contents))
  for text in TEXTS:
    ids = tokenizer.encode(text)
    assert not (ids == tokenizer.boundary).any()
    assert tokenizer.decode(ids) == text


def test_the_boundary_is_found_or_named(path, tmp_path):
  other = train_bpe(tmp_path / "other.json", boundary="<|sep|>")
  with pytest.raises(InputError, match=r"none of the usual .* --boundary"):
    load_tokenizer(other)
  assert load_tokenizer(other, "<|sep|>").boundary == 0
  with pytest.raises(InputError, match=r"no token '<x>'"):
    load_tokenizer(path, "<x>")
  (tmp_path / "bad.json").write_text("{}")
  with pytest.raises(InputError, match=r"bad\.json is not a tokenizer"):
    load_tokenizer(tmp_path / "bad.json")
  with pytest.raises(InputError, match="No such file"):
    load_tokenizer(tmp_path / "none.json")
  assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_a_tokenizer_pickles(bpe):
  again = pickle.loads(pickle.dumps(bpe))
  assert again.encode(TEXTS[2]).tolist() == bpe.encode(TEXTS[2]).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_any_size_encode_as_the_whole(bpe, seed):
  rng = random.Random(seed)
  text = Path(dataclasses.__file__).read_text("utf-8")[:6000] + "日本語 é 😀 " * 50
  data, blocks = text.encode(), []
  while data:
    size = rng.randrange(1, 200)
    blocks.append(data[:size])
    data = data[size:]
  encoder = DocumentEncoder(bpe, piece=rng.choice([200, 1000]))
  ids = [part for block in blocks for part in encoder.feed(block)] + list(encoder.finish())
  assert len(ids) > 5
  np.testing.assert_array_equal(np.concatenate(ids), bpe.encode(text))
  assert encoder.replaced == 0


def test_invalid_utf8_is_counted_with_the_first_offset(bpe):
  out = []
  data = "é\ufffd".encode() + b"ab\xff\xfe c\xc3"
  pieces = iter([data[:1], data[1:6], data[6:]])
  encoder = encode_document(bpe, pieces, out.append)
  assert bpe.decode(np.concatenate(out)) == "é\ufffdab\ufffd\ufffd c\ufffd"
  assert (encoder.replaced, encoder.first_replaced) == (3, 7)


def test_a_text_is_cut_between_words_if_it_has_any():
  assert cut_between_words("abc", 5) == 3
  assert cut_between_words("one two three", 9) == 7
  assert cut_between_words("one, \n two", 8) == 4
  assert cut_between_words("abcdefgh", 5) == 5
  assert cut_between_words("one two " + "x" * 9000, 8900) == 7
