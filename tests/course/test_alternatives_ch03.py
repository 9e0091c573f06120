"""Chapter 3's checks accept what is right, however it is written: other ways than the reference's."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.authoring.exercise_code import BEGIN_SOLUTION, END_SOLUTION

SOFTMAX = """
def softmax(scores):
    largest = scores.max(dim=-1, keepdim=True).values
    return (scores - largest - (scores - largest).exp().sum(-1, keepdim=True).log()).exp()
"""
CAUSAL_MASK = """
def causal_mask(start, new, device="cpu"):
    positions = torch.arange(start, start + new, device=device)
    return torch.arange(start + new, device=device)[None, :] <= positions[:, None]
"""
GROUPED_ATTENTION = """
def grouped_attention(queries, keys, values, visible):
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    wide = torch.promote_types(queries.dtype, torch.float32)
    outputs, weights = [], []
    for head in range(heads):
        scores = queries[:, head].to(wide) @ keys[:, head // group].to(wide).T / queries.shape[-1] ** 0.5
        if visible is not None:
            scores = torch.where(visible, scores, torch.finfo(wide).min)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        weights.append(powers / powers.sum(-1, keepdim=True))
        outputs.append((weights[-1] @ values[:, head // group].to(wide)).to(queries.dtype))
    return torch.stack(outputs, 1), torch.stack(weights)
"""
ATTEND = """
def attend(queries, layer, batch, cache):
    parts = []
    for span in batch.spans:
        mask = causal_mask(span.start, span.length, queries.device)
        parts.append(grouped_attention(queries[span.rows], *cache.read(layer, span.request_id), mask)[0])
    return torch.cat(parts)
"""
ATTEND_THAT_LOOKS_AT_NUMBERS = """
def attend(queries, layer, batch, cache):
    parts = []
    for span in batch.spans:
        mask = torch.ones(span.length, span.start + span.length).tril(span.start).bool()
        mask = None if mask.all() else mask.to(queries.device)
        rows = queries[torch.arange(span.rows.start, span.rows.stop)]
        assert not rows.isnan().any()
        parts.append(grouped_attention(rows, *cache.read(layer, span.request_id), mask)[0])
    return torch.cat(parts)
"""
BLOCK_KEYS = """
def block_keys(token_ids, block_size, parent=b""):
    keys = [parent]
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        block = b"".join(index.to_bytes(8, "little") for index in token_ids[start : start + block_size])
        keys.append(hashlib.sha256(keys[-1] + block).digest())
    return keys[1:]
"""


APPEND_ROWS = """
def append_rows(stored, start, new):
    if stored is None:
        stored = new[:0]
    rows = new.new_empty(start + len(new), *new.shape[1:])
    rows[:start], rows[start:] = stored[:start], new
    return rows
"""
APPEND_WITH_CAT_ONLY = """
def append_rows(stored, start, new):
    parts = [new] if stored is None else [stored[:start], new]
    return torch.cat(parts)
"""
WRITE_POSITIONS = """
def write_positions(row, start, keys, values):
    for i, (key, value) in enumerate(zip(keys, values)):
        row[0][:, start + i] = key
        row[1][:, start + i] = value
"""
WRITE_POSITIONS_AT_ONCE = """
def write_positions(row, start, keys, values):
    new = torch.stack([keys, values]).permute(0, 2, 1, 3)
    row[:, :, start : start + len(keys)].copy_(new)
    return row
"""
SLOTS_OF = """
def slots_of(table, start, length, block_size):
    slots = []
    for position in range(start, start + length):
        number, place = divmod(position, block_size)
        slots.append(table[number] * block_size + place)
    return torch.tensor(slots)
"""
READ_BLOCKS = """
def read_blocks(stored, blocks, length, room):
    for place, block in enumerate(blocks.tolist()):
        room[:, :, place] = stored[:, :, block]
    kinds, heads, number, size, head_dim = room.shape
    rows = room.view(kinds, heads, number * size, head_dim)[:, :, :length].permute(0, 2, 1, 3)
    return rows[0], rows[1]
"""
READ_KEYS_THEN_VALUES = """
def read_blocks(stored, blocks, length, room):
    return tuple(
        torch.index_select(kind, 1, blocks, out=part).flatten(1, 2).transpose(0, 1)[:length]
        for kind, part in zip(stored, room)
    )
"""
READ_BY_GATHER = """
def read_blocks(stored, blocks, length, room):
    torch.gather(stored, 2, blocks.view(1, 1, -1, 1, 1).expand(room.shape), out=room)
    keys, values = room.flatten(2, 3).narrow(2, 0, length)
    return keys.transpose(0, 1), values.transpose(0, 1)
"""
MAKE_WRITABLE = """
def make_writable(table, index, allocator, storage):
    if allocator.ref_counts[table[index]] < 2:
        return
    new, old = allocator.allocate(), table[index]
    table[index] = new
    allocator.release(old)
    for layer in range(len(storage)):
        for kind in (0, 1):
            storage[layer][kind][:, new].copy_(storage[layer][kind][:, old])
"""


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    [
        ("3.1", SOFTMAX),
        ("3.2", CAUSAL_MASK),
        ("3.3", GROUPED_ATTENTION),
        ("3.4", ATTEND),
        ("3.4", ATTEND_THAT_LOOKS_AT_NUMBERS),
        ("3.5", APPEND_ROWS),
        ("3.5", APPEND_WITH_CAT_ONLY),
        ("3.7", WRITE_POSITIONS),
        ("3.7", WRITE_POSITIONS_AT_ONCE),
        ("3.9", BLOCK_KEYS),
        ("3.10", SLOTS_OF),
        ("3.11", READ_BLOCKS),
        ("3.11", READ_KEYS_THEN_VALUES),
        ("3.11", READ_BY_GATHER),
        ("3.12", MAKE_WRITABLE),
    ],
)
def test_a_function_written_in_another_way_passes(exercise_id, source):
    exercises.find(exercise_id).check(mutants.written(exercise_id, source))


# exercise, method, its body in another way
METHODS = [
    ("3.8", "release", """
        if block in self.free or block in self.kept or self.ref_counts[block] < 1:
            raise ValueError("nobody holds it")
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            if keep:
                self.kept[block] = None
            else:
                self.free.append(block)
     """),
    ("3.8", "allocate", """
        if not self.num_available:
            raise OutOfMemory("nothing left")
        if not self.free:
            oldest = next(iter(self.kept))
            if self.on_evict:
                self.on_evict(oldest)
            del self.kept[oldest]
            self.free.append(oldest)
        block = self.free.popleft()
        self.ref_counts[block] += 1
        return block
     """),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "method", "body"), METHODS)
def test_a_method_written_in_another_way_passes(exercise_id, method, body):
    code = mutants.code_of(exercise_id)
    head, _, rest = code.partition(f"    def {method}(")
    contract, _, rest = rest.partition(BEGIN_SOLUTION)
    _, _, after = rest.partition(END_SOLUTION)
    source = f"{head}    def {method}({contract}{BEGIN_SOLUTION}{body.rstrip()}\n        {END_SOLUTION}{after}"
    exercises.find(exercise_id).check(mutants.written(exercise_id, source))
