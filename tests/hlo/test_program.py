"""The text of a compiled program is read as XLA means it."""

import pytest

from ldm_jax.hlo.collectives import collectives, group_size
from ldm_jax.hlo.program import estimated_cycles, parse, parse_arrays

# One exchange each way; the all-gather is spread over three fusions, one of them in the loop,
# which runs 4 times.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[16,8]{1,0})->f32[16,8]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%onward (in.4: bf16[2,8]) -> bf16[16,8] {
  %in.4 = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[16,8]{1,0} all-gather(%in.4), channel_id=1, \
replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}, frontend_attributes={chain_id="3"}
}

%begin (in.0: bf16[2,8]) -> (bf16[2,8], bf16[16,8]) {
  %in.0 = bf16[2,8]{1,0:T(2,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%in.0), channel_id=1, \
replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %pair = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) tuple(%in.0, %all-gather.1)
}

%end (in.1: bf16[2,8]) -> bf16[16,8] {
  %in.1 = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0} all-gather(%in.1), channel_id=1, \
replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}, frontend_attributes={chain_id="3"}
}

%all-reduce-scatter.5 (in.2: f32[16,8]) -> f32[2,8] {
  %in.2 = f32[16,8]{1,0} parameter(0)
  %all-reduce.9 = f32[16,8]{1,0} all-reduce(%in.2), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %part = f32[2,8]{1,0} slice(%all-reduce.9), slice={[0:2], [0:8]}
}

%body (state: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %state = (s32[], f32[16,8]{1,0}) parameter(0)
  %carried = f32[16,8]{1,0} get-tuple-element(%state), index=1
  %count = s32[] get-tuple-element(%state), index=0
  %scattered = f32[2,8]{1,0} fusion(%carried), kind=kCustom, calls=%all-reduce-scatter.5, \
backend_config={"estimated_cycles":"100"}
  %meanwhile = bf16[16,8]{1,0} fusion(%carried), kind=kOutput, calls=%onward
  %one = s32[] constant(1)
  %more = s32[] add(%count, %one)
  ROOT %next = (s32[], f32[16,8]{1,0}) tuple(%more, %carried)
}

%condition (state.1: (s32[], f32[16,8])) -> pred[] {
  %state.1 = (s32[], f32[16,8]{1,0}) parameter(0)
  %bound = s32[]{:T(128)} constant(4)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%count.1, %bound), direction=LT
}

%never (in.3: f32[16,8]) -> f32[16,8] {
  %in.3 = f32[16,8]{1,0} parameter(0)
  ROOT %all-reduce.7 = f32[16,8]{1,0} all-reduce(%in.3), channel_id=9, to_apply=%add
}

ENTRY %main (p.0: f32[16,8], p.1: bf16[2,8]) -> f32[16,8] {
  %p.0 = f32[16,8]{1,0} parameter(0), sharding={devices=[8,1]<=[8]}
  %p.1 = bf16[2,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %started = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) fusion(%p.1), kind=kOutput, calls=%begin
  %ended = bf16[16,8]{1,0} fusion(%p.1), kind=kOutput, calls=%end, \
backend_config={"estimated_cycles":"7","flag":"x"}
  %reduce-start = f32[16,8]{1,0} all-reduce-start(%p.0), channel_id=1, \
replica_groups=[4,2]<=[8], to_apply=%add
  %reduce-done = f32[16,8]{1,0} all-reduce-done(%reduce-start)
  %permute-start = (bf16[2,8]{1,0}, bf16[2,8]{1,0}, u32[], u32[]) \
collective-permute-start(%p.1), channel_id=6, source_target_pairs={{0,1},{1,0}}
  %permute-done = bf16[2,8]{1,0} collective-permute-done(%permute-start)
  %scatter = f32[1,8]{1,0} reduce-scatter(%p.0), channel_id=8, replica_groups=[1,16]<=[16], \
dimensions={0}, to_apply=%add
  %initial = (s32[], f32[16,8]{1,0}) tuple(%zero, %p.0)
  %loop = (s32[], f32[16,8]{1,0}) while(%initial), condition=%condition, body=%body
  ROOT %result = f32[16,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_each_exchange_is_counted_once_with_its_size_group_and_loop():
  found = {(c.kind, c.shapes, c.bytes, c.group_size, c.runs) for c in collectives(PROGRAM)}
  assert found == {
    ("all-gather", ("bf16[16,8]",), 256, 8, 1),
    ("reduce-scatter", ("f32[16,8]",), 512, 4, 4),
    ("all-reduce", ("f32[16,8]",), 512, 2, 1),
    ("collective-permute", ("bf16[2,8]",), 32, 2, 1),
    ("reduce-scatter", ("f32[16,8]",), 512, 16, 1),
  }
  assert len(collectives(PROGRAM)) == len(found)


def test_received_bytes_are_the_least_that_each_exchange_can_do_with():
  received = {(c.kind, c.group_size): c.received_bytes for c in collectives(PROGRAM)}
  assert received == {
    ("all-gather", 8): 256 * 7 / 8,
    ("reduce-scatter", 4): 4 * 512 * 3 / 4,
    ("all-reduce", 2): 2 * 512 / 2,
    ("collective-permute", 2): 32,
    ("reduce-scatter", 16): 512 * 15 / 16,
  }


def test_estimated_cycles_count_a_loop_as_often_as_it_runs():
  assert estimated_cycles(PROGRAM) == 4 * 100 + 7


def test_runs_and_fused_computations():
  program = parse(PROGRAM)
  runs = {name: program.runs[name] for name in ("main", "body", "condition", "never", "end")}
  assert runs == {"main": 1, "body": 4, "condition": 4, "never": 0, "end": 1}
  assert program.runs["all-reduce-scatter.5"] == 4
  assert program.fused == {"begin", "onward", "end", "all-reduce-scatter.5", "add"}


@pytest.mark.parametrize(
  ("old", "new", "runs"),
  [
    ("%one = s32[] constant(1)", "%one = s32[] constant(2)", 2),  # two iterations put into one
    ("%one = s32[] constant(1)", "%one = s32[] constant(3)", 2),
    ("%zero = s32[] constant(0)", "%zero = s32[] constant(1)", 3),
    ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}', 9),
    ("%more = s32[] add(%count, %one)", "%more = s32[] fusion(%count), calls=%increment", 4),
  ],
)
def test_how_often_a_loop_runs(old, new, runs):
  increment = """\
%increment (x.2: s32[]) -> s32[] {
  %x.2 = s32[] parameter(0)
  %one.2 = s32[]{:T(128)} constant(1)
  ROOT %y.2 = s32[] add(%x.2, %one.2)
}

"""
  text = PROGRAM.replace(old, new).replace("%body (state", increment + "%body (state")
  assert text != PROGRAM
  assert parse(text).runs["body"] == runs


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("%bound = s32[]{:T(128)} constant(4)", "%bound = s32[] parameter(1)"),
    ("direction=LT", "direction=NE"),
    ("%more = s32[] add", "%more = s32[] multiply"),
    ("%zero = s32[] constant(0)", "%zero = s32[] parameter(2)"),
  ],
)
def test_a_loop_of_unknown_length_is_an_error(old, new):
  with pytest.raises(ValueError, match="how often the loop loop runs"):
    parse(PROGRAM.replace(old, new))


def test_text_that_is_no_program():
  with pytest.raises(ValueError, match="no ENTRY"):
    parse("hello")


@pytest.mark.parametrize(
  ("text", "plain", "padded"),
  [
    ("f32[16,8]{1,0:T(8,128)}", 512, 16 * 128 * 4),
    ("f32[16,8]{0,1:T(8,128)}", 512, 8 * 128 * 4),  # the axis of 16 is the one cut by 128
    ("bf16[4,9,200]{2,1,0:T(8,128)(2,1)}", 4 * 9 * 200 * 2, 4 * 16 * 256 * 2),
    ("bf16[4,9,200]{2,1,0:T(8,128)(2,1)S(1)}", 4 * 9 * 200 * 2, 4 * 16 * 256 * 2),
    ("f32[300]{0:T(256)}", 1200, 2048),
    ("bf16[3]{0:T(256)(128)(2,1)}", 6, 512),
    ("f32[]{:T(128)}", 4, 512),
    ("pred[5]", 5, 5),
    ("s4[10]", 5, 5),
    ("f8e4m3fn[7,3]{1,0}", 21, 21),
    ("token[]", 0, 0),
  ],
)
def test_bytes_with_and_without_padding(text, plain, padded):
  (array,) = parse_arrays(text)
  assert (array.bytes, array.padded_bytes) == (plain, padded)


def test_memory_space_and_name():
  first, second = parse_arrays("(bf16[4,9]{1,0:T(8,128)S(1)}, /*index=1*/u32[]{:S(2)})")
  assert (first.space, second.space, str(first), str(second)) == (1, 2, "bf16[4,9]", "u32[]")


@pytest.mark.parametrize(
  ("groups", "size"),
  [
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2),
    ("replica_groups=[2,4]<=[2,2,2]T(0,2,1)", 4),
    ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
    ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
    ("source_target_pairs={{0,1},{1,2}}", 2),
  ],
)
def test_every_way_to_write_a_group(groups, size):
  assert group_size(f"channel_id=1, {groups}, dimensions={{0}}") == size


def test_groups_that_cannot_be_read_are_no_number():
  with pytest.raises(ValueError, match="cannot read the groups"):
    group_size("channel_id=1, replica_groups={}, dimensions={0}")
