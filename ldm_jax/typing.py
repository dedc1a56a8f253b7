"""The dimension legend, and the array types that public signatures use.

One letter means one thing everywhere: in these types, in name suffixes such as `x_BTD` and in
docstrings.

    B  batch                        L  sublayers: attention and MLP count one each, L = 2 x blocks
    T  sequence position            G  memory groups
    D  model width                  V  value width of one group, D / G
    H  attention heads              K  key width of one group
    J  key/value heads              R  width of a control latent
    C  width of one head            F  MLP hidden width

The vocabulary size is written `vocab_size` in full.  The annotations cost nothing at run time; the
test-suite checks every one of them.
"""

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

AnyArray: TypeAlias = Array | np.ndarray
Dtype: TypeAlias = Any
PyTree: TypeAlias = Any
PathLike: TypeAlias = str | os.PathLike

# The sublayer that a depth mixer wraps: [B, T, D] -> [B, T, D].
Sublayer: TypeAlias = Callable[[jax.Array], jax.Array]

ActivationsBTD: TypeAlias = Float[Array, "B T D"]
TokensBT: TypeAlias = Int[Array, "B T"]
MaskBT: TypeAlias = Bool[Array, "B T"]

# Depth memory without fixed batch axes: `*batch` is anything, a group axis included.
Memory: TypeAlias = Float[AnyArray, "*batch V K"]
InverseCovariance: TypeAlias = Float[AnyArray, "*batch K K"]
Key: TypeAlias = Float[AnyArray, "*batch K"]
Value: TypeAlias = Float[AnyArray, "*batch V"]
# A per-group number: [G], or with the batch axes in front, or a scalar.
PerGroup: TypeAlias = ArrayLike
