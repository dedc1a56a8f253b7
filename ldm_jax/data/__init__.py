"""Documents to batches: tokenizers, sources, packing into rows, the order of rows."""

from ldm_jax.data.packing import Batch, PackedRows, lay_end_to_end
from ldm_jax.data.pipeline import Dataset, load_dataset, load_tokenizer_of
from ldm_jax.data.prepared import PreparedData
from ldm_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

__all__ = [
  "Batch",
  "ByteTokenizer",
  "Dataset",
  "HuggingFaceTokenizer",
  "PackedRows",
  "PreparedData",
  "lay_end_to_end",
  "load_dataset",
  "load_tokenizer",
  "load_tokenizer_of",
]
