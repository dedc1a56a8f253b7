"""What tests of prepared data share: a small BPE tokenizer, a hostile folder, reading back."""

import gzip
import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from ldm_jax.data import PreparedData
from ldm_jax.data.reading import zstd


def train_bpe(path: Path, boundary: str = "<|endoftext|>") -> Path:
  """A byte-level BPE tokenizer of 400 ids, trained on a source file of the standard library."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=[boundary, "<|pad|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator([Path(os.__file__).read_text("utf-8")], trainer)
  tokenizer.save(str(path))
  return path


def read_documents(folder: Path) -> dict[str, list[bytes | str]]:
  """Every document of a prepared data set, by part, as text (bytes for the byte tokenizer)."""
  data = PreparedData(folder)
  result = {}
  for part in ("train", "held_out"):
    ids = data.stream(part)[:]
    edges = np.flatnonzero(ids == data.tokenizer.boundary)
    assert edges[0] == 0
    assert edges[-1] == len(ids) - 1
    pieces = [ids[a + 1 : b] for a, b in itertools.pairwise(edges)]
    if data.tokenizer.kind == "bytes":
      result[part] = [piece.astype(np.uint8).tobytes() for piece in pieces]
    else:
      result[part] = [data.tokenizer.decode(piece) for piece in pieces]
  return result


def write_lines(path: Path, count: int, seed: int = 0) -> list[str]:
  """JSON lines with the fields id and text; returns the texts."""
  rng = random.Random(seed)
  texts = [
    f"{path.stem} document {i}: " + "naïve words " * rng.randrange(1, 60) for i in range(count)
  ]
  lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
  path.write_text("\n".join(lines) + "\n", "utf-8")
  return texts


def hostile_folder(folder: Path) -> tuple[list[bytes], set[tuple[str, str, str]]]:
  """Writes every kind of bad input between good ones.

  Returns:
    The good documents, as the byte tokenizer keeps them, and (what, file, where) of each problem.
  """
  folder.mkdir()
  good, problems = [], set()

  def file(name, contents, document=None):
    (folder / name).write_bytes(contents)
    if document is not None:
      good.append(document)

  file("empty.txt", b"")
  file("empty.jsonl", b"")
  file("latin.txt", "café".encode("latin-1"), "café".encode("latin-1"))
  file("cut.txt", "naïve caf\u00e9".encode()[:-1], "naïve caf\u00e9".encode()[:-1])
  file("nul.txt", b"a\0b\0", b"a\0b\0")
  for name in (".hidden.txt", "old.txt~", "old.txt.bak", ".x.txt.swp", "picture.png"):
    file(name, b"never read")
    problems.add(("ignored", name, ""))
  (folder / "folder.jsonl").mkdir()
  problems.add(("ignored", "folder.jsonl", ""))
  os.symlink("nowhere", folder / "dead.txt")
  problems.add(("ignored", "dead.txt", ""))
  problems |= {("empty", "empty.txt", ""), ("empty", "empty.jsonl", "")}

  def lines(name):
    texts = [f"{name} document {i} " * 9 for i in range(300)]
    made = [json.dumps({"text": text}).encode() for text in texts]
    bad = {
      3: (b'{"text": "no end', "skipped", None),
      5: (b'{"other": 1}', "skipped", None),
      7: (b'{"text": 5}', "skipped", None),
      9: (b'{"text": ""}', "empty", None),
      11: (b"[1]", "skipped", None),
      13: (b'{"text": "bad \xff"}', "repaired", "bad \ufffd"),
      15: (rb'{"text": "half \ud83d"}', "repaired", "half \ufffd"),
      17: (b"", None, None),
    }
    for index, (line, what, text) in bad.items():
      made[index], texts[index] = line, text
      if what:
        problems.add((what, name, f"line {index + 1}"))
    return b"\n".join(made), texts

  contents, texts = lines("l.jsonl")
  file("l.jsonl", contents)
  good.extend(text.encode() for text in texts if text)

  contents, texts = lines("cut.jsonl.gz")
  packed = gzip.compress(contents)
  packed = packed[: len(packed) * 3 // 4]
  file("cut.jsonl.gz", packed)
  whole = zlib_prefix(packed).rpartition(b"\n")[0].count(b"\n") + 1
  good.extend(text.encode() for text in texts[:whole] if text)
  problems.add(("skipped", "cut.jsonl.gz", f"after line {whole}"))

  packed = gzip.compress(random.Random(0).randbytes(3_000_000))  # cut well inside
  file("cut.txt.gz", packed[:2_500_000])
  problems.add(("skipped", "cut.txt.gz", ""))
  file("cut.txt.zst", zstd.compress(b"some text " * 100)[:-3])
  problems.add(("skipped", "cut.txt.zst", ""))
  file("whole.txt.zst", zstd.compress(b"from zstd"), b"from zstd")
  file("whole.txt.gz", gzip.compress(b"from ") + gzip.compress(b"gzip"), b"from gzip")

  pq.write_table(pa.table({"text": ["pq one", None, "", "pq two"]}), folder / "p.parquet")
  good.extend([b"pq one", b"pq two"])
  problems |= {("skipped", "p.parquet", "row 2"), ("empty", "p.parquet", "row 3")}
  pq.write_table(pa.table({"body": ["x"]}), folder / "other.parquet")
  file("bad.parquet", b"PAR1 nonsense")
  problems |= {("skipped", "other.parquet", ""), ("skipped", "bad.parquet", "")}
  return good, problems


def zlib_prefix(packed: bytes) -> bytes:
  """What a cut gzip file still gives."""
  import zlib

  return zlib.decompressobj(31).decompress(packed)
