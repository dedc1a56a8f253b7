"""Every depth-mixing mechanism again, in float64 NumPy and from its equations.

An oracle keeps the whole history of a stack (embedding, outputs, keys, ...) and takes the short
way to each read: the rls memory is solved for as a ridge regression, attention residuals add up the
outputs of a block.  It knows `mixer_l` only by the names of its parameters.
"""

import numpy as np

EPS = 1e-6


def sigmoid(z):
  return 1 / (1 + np.exp(-z))


def silu(z):
  return z * sigmoid(z)


def softplus(z):
  return np.logaddexp(z, 0)


def l2norm(z):
  return z / np.sqrt(np.sum(z**2, axis=-1, keepdims=True) + 1e-30)


def rms_norm(z, axes=(-1,)):
  return z / np.sqrt(np.mean(z**2, axis=axes, keepdims=True) + EPS)


def softmax(z, axis):
  e = np.exp(z - z.max(axis=axis, keepdims=True))
  return e / e.sum(axis=axis, keepdims=True)


def sinkhorn(logits, iterations=20):
  """exp(logits) with columns, then rows scaled to sum to 1, `iterations` times."""
  m = np.exp(logits)
  for _ in range(iterations):
    m = m / m.sum(axis=-2, keepdims=True)
    m = m / m.sum(axis=-1, keepdims=True)
  return m


class Oracle:
  """A mechanism: `read(l)` before sublayer l, `write(l, v)` after it, `read(L)` for the head."""

  def __init__(self, config, params, sublayers, x):
    self.config, self.params, self.sublayers = config, params, sublayers
    self.start(x)


class PreLN(Oracle):
  def start(self, x):
    self.x = x

  def read(self, _):
    return self.x

  def write(self, _, v):
    self.x = self.x + v


class DepthMemory(Oracle):
  def start(self, x):
    self.x = x
    self.pending = 0
    self.writes = []  # (k [..., G, K], v [..., G, V], strength [..., G], λ [G]) in order
    if self.config.write_embedding:
      groups, key_dim = self.config.groups, self.config.key_dim
      v = x.reshape(*x.shape[:-1], groups, -1)
      k = np.full((*v.shape[:-1], key_dim), 1 / np.sqrt(key_dim))
      self.writes.append((k, v, np.ones(v.shape[:-1]), np.ones(groups)))

  def read(self, l):
    if l < self.config.write_every:
      return self.x
    p = self.params[f"mixer_{l}"]["read_controls"]
    a = self.latent(p)
    q = l2norm(self.heads(p, "query", a))
    r = np.einsum("...gvk,...gk->...gv", self.memory(), q)
    if self.config.readout == "memory_only":
      return r.reshape(self.x.shape)
    scale = p["gain"] * sigmoid(a @ p["gate_kernel"] + p["gate_bias"])
    return self.x + (scale[..., None] * r).reshape(self.x.shape)

  def write(self, l, v):
    self.x = self.x + v if self.config.residual else v
    self.pending = self.pending + v
    if (l + 1) % self.config.write_every:
      return
    v, self.pending = self.pending, 0
    v = v.reshape(*v.shape[:-1], self.config.groups, -1)
    p = self.params[f"mixer_{l}"]["write_controls"]
    c = self.latent(p)
    k = l2norm(self.heads(p, "key", c))
    k = np.broadcast_to(k, (*v.shape[:-1], k.shape[-1]))
    strength, forgetting = np.ones(v.shape[:-1]), np.ones(v.shape[-2])
    if self.config.rule == "rls" and self.config.importance:
      strength = softplus(c @ p["importance_kernel"] + p["importance_bias"])
    if self.config.rule == "rls" and self.config.forgetting:
      least = self.config.min_forgetting
      forgetting = least + (1 - least) * sigmoid(p["forgetting"])
    if self.config.rule == "delta":
      strength = sigmoid(c @ p["beta_kernel"] + p["beta_bias"])
    self.writes.append((k, v, strength, forgetting))

  def latent(self, p):
    p = p["latent"]
    return silu(rms_norm(self.x) @ p["latent_kernel"] + p["latent_bias"])

  def heads(self, p, name, latent):
    return np.einsum("...r,rgk->...gk", latent, p[f"{name}_kernel"]) + p[f"{name}_bias"]

  def memory(self):
    """M [..., G, V, K] of all writes so far."""
    k, v, strength, forgetting = (np.stack(part) for part in zip(*self.writes, strict=True))
    if self.config.rule == "outer":
      return np.einsum("l...v,l...k->...vk", v, k)
    if self.config.rule == "delta":
      m = np.zeros((*v.shape[1:], k.shape[-1]))
      for k_i, v_i, beta in zip(k, v, strength, strict=True):
        error = v_i - np.einsum("...vk,...k->...v", m, k_i)
        m = m + beta[..., None, None] * error[..., None] * k_i[..., None, :]
      return m
    # argmin_M Σ_i Γ(l, i) ω_i |M k_i − v_i|² + Γ(l)/α |M|², Γ(l, i) = Π_{i<j≤l} λ_j.
    later = np.ones_like(forgetting)
    for i in reversed(range(len(later) - 1)):
      later[i] = later[i + 1] * forgetting[i + 1]
    weighted = (strength * later.reshape(len(later), *(1,) * (strength.ndim - 2), -1))[
      ..., None
    ] * k
    ridge = later[0] * forgetting[0] / self.config.alpha
    a = np.einsum("l...i,l...j->...ij", weighted, k)
    a = a + ridge[:, None, None] * np.eye(k.shape[-1])
    return np.swapaxes(np.linalg.solve(a, np.einsum("l...k,l...v->...kv", weighted, v)), -1, -2)


class AttentionResiduals(Oracle):
  def start(self, x):
    self.sources = [x]  # v_0 = embedding, then every output

  def read(self, l):
    size = self.config.block_size
    # Whole blocks of outputs, plus what the current one has so far; the head sees the last,
    # possibly short, block as that.
    closed = l // size
    sources = [self.sources[0]]
    sources += [sum(self.sources[1 + n * size : 1 + (n + 1) * size]) for n in range(closed)]
    if l % size:
      sources.append(sum(self.sources[1 + closed * size :]))
    if l == 0:
      return sources[0]
    query, scale = self.query(l)
    v = np.stack(sources)
    return np.sum(softmax((scale * rms_norm(v)) @ query, axis=0)[..., None] * v, axis=0)

  def write(self, _, v):
    self.sources.append(v)

  def query(self, l):
    """(w_l, s_l) from whichever mixer holds them: the first of the block, or l itself."""
    owner, row = f"mixer_{l}", 0
    if self.together and l < self.sublayers:
      first = l - l % self.config.block_size
      # Block 0 has no row for sublayer 0, which sees one source.
      owner, row = f"mixer_{first}", l - max(first, 1)
    p = self.params[owner]["queries"]
    return p["query"][row], p["norm_scale"][row]

  together = True


class SeparateAttentionResiduals(AttentionResiduals):
  """Every sublayer owns its query."""

  together = False


class HyperConnections(Oracle):
  def start(self, x):
    self.x = np.repeat(x[..., None, :], self.config.streams, axis=-2)  # [..., N, D]

  def read(self, l):
    if l == self.sublayers:
      return self.x.sum(axis=-2)
    if l == 0:
      return self.x[..., 0, :]
    a_m = self.coefficient(l, "read", "alpha")
    return np.einsum("...i,...id->...d", a_m, self.x)

  def write(self, l, v):
    a_r, b = self.coefficient(l, "mix", "alpha"), self.coefficient(l, "write", "beta")
    mixed = np.einsum("...ij,...id->...jd", a_r, self.x)
    self.x = mixed + b[..., :, None] * v[..., None, :]

  def coefficient(self, l, name, scale):
    p = self.params[f"mixer_{l}"]["coefficients"]
    static = p[f"{name}_weight"]
    if not self.config.dynamic:
      return np.broadcast_to(static, self.x.shape[:-2] + static.shape)
    return static + p[f"{scale}_scale"] * np.tanh(rms_norm(self.x) @ p[f"{name}_kernel"])


class ManifoldHyperConnections(Oracle):
  def start(self, x):
    self.x = np.repeat(x[..., None, :], self.config.streams, axis=-2)  # [..., N, D]

  def read(self, l):
    if l == self.sublayers:
      return self.x.mean(axis=-2)
    if l == 0:
      return self.x[..., 0, :]
    h_pre = sigmoid(self.logits(l, "pre"))
    return np.einsum("...i,...id->...d", h_pre, self.x)

  def write(self, l, v):
    h_post = 2 * sigmoid(self.logits(l, "post"))
    mixed = self.x
    # Neither equal streams nor the mean of the streams feel a doubly stochastic matrix.
    if self.always or 0 < l < self.sublayers - 1:
      mixed = np.einsum("...ij,...jd->...id", sinkhorn(self.logits(l, "res")), self.x)
    self.x = mixed + h_post[..., :, None] * v[..., None, :]

  def logits(self, l, name):
    p = self.params[f"mixer_{l}"]["coefficients"]
    u = rms_norm(self.x, axes=(-2, -1))
    projected = np.einsum("...nd,ndm->...m", u, p[f"{name}_kernel"])
    bias = p[f"{name}_bias"]
    return p[f"{name}_scale"] * projected.reshape(u.shape[:-2] + bias.shape) + bias

  always = False


class AlwaysMixing(ManifoldHyperConnections):
  """The first and the last sublayer mix the streams too."""

  always = True


ORACLES = {
  "preln": PreLN,
  "ldm": DepthMemory,
  "attnres": AttentionResiduals,
  "hc": HyperConnections,
  "mhc": ManifoldHyperConnections,
}


def run(config, params, x, weights, f, oracle=None):
  """The stack of sublayers v = f(read, weights[l]); returns y and what every sublayer read."""
  mixer = (oracle or ORACLES[config.kind])(config, params, len(weights), x)
  reads = []
  for l, w in enumerate(weights):
    reads.append(mixer.read(l))
    mixer.write(l, f(reads[-1], w))
  return mixer.read(len(weights)), reads
