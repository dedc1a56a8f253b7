"""Products, traffic and padding of compiled programs, against counts by hand."""

import pytest

from ldm_jax.hlo.costs import (
  attention_kernel_flops,
  hbm_bytes,
  kernels,
  largest_arrays,
  product_flops,
)
from ldm_jax.hlo.program import parse


def program(body, before=""):
  """A program whose entry has the given lines; %x is f32[8,256] and %w f32[256,128] in HBM."""
  return parse(
    f"""{before}
ENTRY %main (x: f32[8,256], w: f32[256,128]) -> f32[] {{
  %x = f32[8,256]{{1,0:T(8,128)}} parameter(0)
  %w = f32[256,128]{{1,0:T(8,128)}} parameter(1)
{body}
}}
"""
  )


@pytest.mark.parametrize(
  ("line", "multiply_adds"),
  [
    ("f32[8,128] convolution(%x, %w), dim_labels=bf_io->bf", 8 * 256 * 128),
    ("f32[8,128] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 8 * 256 * 128),
    # A batch of 8 products, written as a spatial axis that meets itself only on the diagonal.
    (
      "f32[8,4,5] convolution(%l, %r), window={size=8 stride=7 lhs_dilate=8}, "
      "dim_labels=0bf_0oi->0bf",
      8 * 4 * 6 * 5,
    ),
    # A contraction over two axes, the second as the window of a convolution.
    (
      "f32[8,128,1] convolution(%l3, %r3), window={size=6}, dim_labels=bf0_io0->bf0",
      8 * 9 * 6 * 128,
    ),
    # An output axis, as a kernel that slides over one position: padding meets nothing.
    (
      "f32[8,6,7] convolution(%l4, %r4), window={size=6 pad=5_5 rhs_reversal=1}, "
      "dim_labels=bf0_i0o->b0f",
      8 * 9 * 6 * 7,
    ),
  ],
)
def test_products(line, multiply_adds):
  text = f"""  %l = f32[8,4,6] parameter(2)
  %r = f32[8,5,6] parameter(3)
  %l3 = f32[8,9,6] parameter(4)
  %r3 = f32[9,128,6] parameter(5)
  %l4 = f32[8,9,1] parameter(6)
  %r4 = f32[9,6,7] parameter(7)
  ROOT %out = {line}"""
  assert product_flops(program(text)) == 2 * multiply_adds


LOOP = """
%body (s: (s32[], f32[8,256], f32[256,128])) -> (s32[], f32[8,256], f32[256,128]) {
  %s = (s32[], f32[8,256], f32[256,128]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %a = f32[8,256]{1,0:T(8,128)} get-tuple-element(%s), index=1
  %b = f32[256,128]{1,0:T(8,128)} get-tuple-element(%s), index=2
  %c = f32[8,128]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
  %one = s32[]{:T(128)S(6)} constant(1)
  %j = s32[]{:T(128)S(6)} add(%i, %one)
  ROOT %t = (s32[], f32[8,256], f32[256,128]) tuple(%j, %a, %b)
}

%condition (s.1: (s32[], f32[8,256], f32[256,128])) -> pred[] {
  %s.1 = (s32[], f32[8,256], f32[256,128]) parameter(0)
  %k = s32[]{:T(128)S(6)} get-tuple-element(%s.1), index=0
  %n = s32[]{:T(128)S(6)} constant(5)
  ROOT %less = pred[]{:T(128)S(6)} compare(%k, %n), direction=LT
}
"""


def test_a_loop_counts_as_often_as_it_runs():
  found = program(
    """  %zero = s32[] constant(0)
  %first = (s32[], f32[8,256], f32[256,128]) tuple(%zero, %x, %w)
  ROOT %end = (s32[], f32[8,256], f32[256,128]) while(%first), condition=%condition, body=%body""",
    LOOP,
  )
  assert product_flops(found) == 5 * 2 * 8 * 256 * 128
  counter = 4  # the element s32[] that the body takes from its state lies in main memory
  assert hbm_bytes(found) == 5 * (4 * (8 * 256 + 256 * 128 + 8 * 128) + counter)


FUSIONS = """
%sum (p0: f32[8,256]) -> f32[8,256] {
  %p0 = f32[8,256]{1,0} parameter(0)
  ROOT %r0 = f32[8,256]{1,0} add(%p0, %p0)
}

%row (p1: f32[256,128], at: s32[]) -> f32[8,128] {
  %p1 = f32[256,128]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %view = f32[256,128]{1,0} bitcast(%p1)
  ROOT %slice = f32[8,128]{1,0} dynamic-slice(%view, %at, %at), dynamic_slice_sizes={8,128}
}

%put (p2: f32[256,128], p3: f32[8,128]) -> f32[256,128] {
  %p2 = f32[256,128]{1,0} parameter(0)
  %p3 = f32[8,128]{1,0} parameter(1)
  %nil = s32[] constant(0)
  ROOT %update = f32[256,128]{1,0} dynamic-update-slice(%p2, %p3, %nil, %nil)
}

%through (p4: f32[256,128], p5: f32[8,256]) -> (f32[256,128], f32[8,256]) {
  %p4 = f32[256,128]{1,0} parameter(0)
  %p5 = f32[8,256]{1,0} parameter(1)
  %inner = f32[8,256]{1,0} fusion(%p5), kind=kLoop, calls=%sum
  ROOT %both = (f32[256,128]{1,0}, f32[8,256]{1,0}) tuple(%p4, %inner)
}
"""
X, W, PART = 4 * 8 * 256, 4 * 256 * 128, 4 * 8 * 128


@pytest.mark.parametrize(
  ("line", "moved"),
  [
    ("f32[8,256]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%sum", 2 * X),
    ("f32[8,256]{1,0:T(8,128)S(1)} fusion(%x), kind=kLoop, calls=%sum", X),
    ("f32[8,128]{1,0:T(8,128)} fusion(%w, %zero), kind=kLoop, calls=%row", 2 * PART),
    ("f32[256,128]{1,0:T(8,128)} fusion(%w, %part), kind=kLoop, calls=%put", 2 * PART),
    (
      "(f32[256,128]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) fusion(%w, %x), kind=kLoop, "
      "calls=%through",
      2 * X,
    ),
    ("f32[2,3]{1,0:T(8,128)} negate(%small)", 2 * 4 * 8 * 128),  # padded to a whole tile
    ("f32[8,256]{1,0:T(8,128)} bitcast(%x)", 0),
    (
      "(f32[8,256]{1,0:T(8,128)S(1)}, f32[8,256]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)",
      X,
    ),
    (
      "((f32[256,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) "
      "slice-start(%w), slice={[0:8], [0:128]}",
      PART,
    ),
    ("f32[8,128]{1,0:T(8,128)S(1)} dynamic-slice(%w, %zero, %zero)", PART),
    ("f32[8,128]{1,0:T(8,128)} slice(%w), slice={[0:8], [0:128]}", 2 * PART),
    ("f32[256,128]{1,0:T(8,128)} dynamic-update-slice(%w, %part, %zero, %zero)", 2 * PART),
    (
      "f32[16,256]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups=[1,2]<=[2]",
      3 * X,
    ),
  ],
)
def test_traffic(line, moved):
  body = f"""  %zero = s32[]{{:T(128)S(6)}} constant(0)
  %part = f32[8,128]{{1,0:T(8,128)}} parameter(2)
  %small = f32[2,3]{{1,0:T(8,128)}} parameter(3)
  ROOT %out = {line}"""
  assert hbm_bytes(program(body, FUSIONS)) == moved


def test_kernels_are_named_and_counted():
  found = program("""  %splash = f32[8,256] custom-call(%x), custom_call_target="tpu_custom_call"
  %other = f32[8,256] custom-call(%x), custom_call_target="AllocateBuffer"
  ROOT %splash.2 = f32[8,256] custom-call(%x), custom_call_target="tpu_custom_call" """)
  assert kernels(found) == {"splash": 2}


KERNELS = """  %mask = s8[1,4,4]{{2,1,0}} parameter(2)
  %q = bf16[2,512,128]{{2,1,0}} parameter(3)
  %k = bf16[1,1024,128]{{2,1,0}} parameter(4)
  %splash_mha_fwd_residuals.1 = bf16[2,512,128] custom-call(%mask, %q, %k, %k), {target}
  {dq}
  ROOT %splash_mha_dkv_no_residuals.1 = bf16[2,512,128] custom-call(%mask, %q, %k, %k), {target}"""


@pytest.mark.parametrize(
  ("dq", "products"),
  [
    ("%splash_mha_dq_no_residuals.1 = bf16[2,512,128] custom-call(%mask, %q, %k, %k), {0}", 9),
    ("", 7),  # one backward kernel for all
  ],
)
def test_flops_of_attention_kernels_are_those_of_their_products(dq, products):
  target = 'custom_call_target="tpu_custom_call"'
  found = program(KERNELS.format(target=target, dq=dq.format(target)))
  assert attention_kernel_flops(found) == products * (2 * 2 * 512 * 1024 * 128) / 2
  assert product_flops(found) == 0


def test_the_largest_arrays_and_their_padding():
  found = program("""  %a = f32[256,4]{1,0:T(8,128)} negate(%x)
  %b = f32[256,4]{1,0:T(8,128)} negate(%x)
  %on_chip = f32[512,512]{1,0:T(8,128)S(1)} negate(%x)
  ROOT %c = f32[256,4]{0,1:T(4,128)} negate(%x)""")
  largest = [(str(a.array), a.count, a.padding) for a in largest_arrays(found)]
  assert largest == [
    ("f32[256,128]", 1, 0),
    ("f32[256,4]", 2, 1 - 4 / 128),
    ("f32[8,256]", 1, 0),
    ("f32[256,4]", 1, 0),
  ]
  assert len(largest_arrays(found, 2)) == 2
