"""Documents to batches: tokenizer, corpora, packing into rows, the order of rows."""

from ldm_jax.data.packing import Batch, PackedRows
from ldm_jax.data.pipeline import Dataset, load_dataset
from ldm_jax.data.tokenizer import ByteTokenizer

__all__ = ["Batch", "ByteTokenizer", "Dataset", "PackedRows", "load_dataset"]
