"""Chapter 3's checks reject wrong solutions, and call the likely mistakes by their names."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check
from llmfromscratch.course.failures import CheckFailed

_AMAX = "scores - scores.amax(dim=-1, keepdim=True)"
_MASK = "torch.ones(new, start + new, dtype=torch.bool, device=device).tril(diagonal=start)"
_SOFTMAX = "scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))"
_ROWS = "(queries * head_dim**-0.5).reshape(new, kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)"
_HIDE = '    if visible is not None:\n        scores.masked_fill_(~visible, float("-inf"))\n'
_MIXED = "return mixed.view(heads, new, head_dim).transpose(0, 1), weights"
_VISIBLE = "None if span.length == 1 else causal_mask(span.start, span.length, queries.device)"
_READ = "        keys, values = cache.read(layer, span.request_id)\n"
_APPENDED = "new.clone() if stored is None else torch.cat([stored[:start], new])"
_ELSE = "    return new.clone() if stored is None else "
_POSITIONS = "slice(start, start + keys.shape[0])"
_KEYS_PLACED = "row[0, :, positions] = keys.transpose(0, 1)"
_VALUES_PLACED = "row[1, :, positions] = values.transpose(0, 1)"
_PLACED = f"    {_KEYS_PLACED}\n    {_VALUES_PLACED}"
_EVICTED = "            if self.on_evict is not None:\n                self.on_evict(block)\n"
_SHARED = "        self.kept.pop(block, None)\n        self.ref_counts[block] += 1"
_TWICE = (
    "        if self.ref_counts[block] == 0:\n"
    '            raise ValueError(f"block {block} is freed twice: nobody holds it.")\n'
)
_LAST = "        if self.ref_counts[block] == 0 and keep:\n"
_PACKED = 'struct.pack(f"<{block_size}q", *ids)'
_DIGEST = f"hashlib.sha256(parent + {_PACKED}).digest()"
_LOOP = (
    "    for end in range(block_size, len(token_ids) + 1, block_size):\n"
    "        ids = token_ids[end - block_size : end]\n"
)
_RUN = f"    keys = []\n{_LOOP}        parent = {_DIGEST}\n"
_BLOCK = "torch.tensor(table)[positions // block_size]"
_SLOTS = f"{_BLOCK} * block_size + positions % block_size"
_GATHER = "torch.index_select(stored, 2, blocks, out=room)"
_FOUND = "room.flatten(2, 3)[:, :, :length].transpose(1, 2)"
_SHARED_BLOCK = "if allocator.ref_counts[old] > 1:"
_NEW = "table[index] = allocator.allocate()"
_COPY = "stored[:, :, table[index]] = stored[:, :, old]"
_COPIES = f"        for stored in storage:\n            {_COPY}\n"
_OLD_FREED = "        allocator.release(old)"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "3.1": [
        (_AMAX, "scores", "is not taken off first"),
        ("sum(dim=-1, keepdim=True)", "sum(dim=0, keepdim=True)", "the sums of the columns"),
        (_AMAX, "scores - scores.max()", "of the whole tensor"),
        (_AMAX, "scores - scores.amin(dim=-1, keepdim=True)", "the smallest score"),
        (_AMAX, "scores - scores.mean(dim=-1, keepdim=True)", "the mean"),
        (" / powers.sum(dim=-1, keepdim=True)", "", "not divided"),
        ("sum(dim=-1, keepdim=True)", "sum()", "of all rows are summed"),
        ("    return powers / powers.sum(dim=-1, keepdim=True)", "    return torch.softmax(scores, 0)", "of a column"),
        ("torch.exp(", "torch.exp2(", "powers of 2"),
        (_AMAX, "scores.sub_(scores.amax(dim=-1, keepdim=True))", "left as they were"),
        (_AMAX, "scores.float() - scores.amax(dim=-1, keepdim=True)", "dtype"),
        ("    return powers / powers.sum(dim=-1, keepdim=True)", "    return scores.log_softmax(-1)", "logarithms"),
        ("    return powers", "    powers", "`return` is missing"),
        (_AMAX, "scores - scores.max(dim=-1, keepdim=True)", "values and indices: take amax, or .values"),
        (", keepdim=True)", ")", "without keepdim=True"),
        ("sum(dim=-1, keepdim=True)", "sum(dim=-1)", "without keepdim=True"),
        (f"torch.exp({_AMAX})\n    return powers / powers.sum(dim=-1, keepdim=True)",
         "torch.exp(scores - scores.amax(-1))\n    return powers / powers.sum(-1)", "without keepdim=True"),
    ],
    "3.2": [
        ("diagonal=start", "diagonal=0", "aligned with the first key"),
        ("diagonal=start", "diagonal=start - 1", "does not see itself"),
        ("diagonal=start", "diagonal=start + 1", "one key too many"),
        (_MASK, f"~{_MASK}", "exchanged"),
        (".tril(diagonal=start)", ".triu(diagonal=start)", "look ahead"),
        (".tril(diagonal=start)", "", "all is visible"),
        (_MASK, f"torch.zeros(new, start + new).masked_fill(~{_MASK}, float('-inf'))", "to be added to scores"),
        (_MASK, f"{_MASK}.float()", "dtype"),
        (_MASK, "torch.ones(new, new, dtype=torch.bool, device=device).tril()", "of the stored tokens are missing"),
        (_MASK, "torch.ones(start + new, start + new, dtype=torch.bool, device=device).tril()", "`new` rows"),
        (_MASK, f"{_MASK}.T", "rows and columns"),
        (_MASK, f"{_MASK}[None]", "another shape"),
        ("device=device", "device='cpu'", "where `device` says"),
        (_MASK, "torch.arange(start + new) == torch.arange(start, start + new)[:, None]", "nothing but itself"),
        (_MASK, f"({_MASK} & (torch.arange(start + new, device=device) >= start))", "stored tokens are hidden"),
    ],
    "3.3": [
        ("queries * head_dim**-0.5", "queries", "not divided by √head_dim"),
        ("head_dim**-0.5", "head_dim**-1", "its root"),
        ("head_dim**-0.5", "head_dim**0.5", "multiplied by √head_dim"),
        (_ROWS, "(queries * head_dim**-0.5).view(new, -1, kv_heads, head_dim).permute(2, 1, 0, 3).flatten(1, 2)", ""),
        ("context, kv_heads, _ = keys.shape\n", "context, kv_heads = len(keys), heads\n"
         "    keys, values = (x.repeat(1, heads // x.shape[1], 1) for x in (keys, values))\n", "dealt out in turn"),
        ("context, kv_heads, _ = keys.shape\n", "context, kv_heads = len(keys), heads\n"
         "    keys, values = (x[:, :1].repeat(1, heads, 1) for x in (keys, values))\n", "looks at the first pair"),
        (_HIDE, _HIDE.replace("if visible is not None:", "if visible is None:\n        visible = "
         "torch.ones(new, context).tril(context - new).bool()\n    if True:"), "then every key counts"),
        ("keys.permute(1, 2, 0)", "keys.transpose(0, 1).reshape(kv_heads, head_dim, context)",
         "reshaped to [..., head_dim"),
        ("keys.permute(1, 2, 0)", "keys.transpose(0, 1)", "shapes that do not go together"),
        (_ROWS, "(queries * head_dim**-0.5).reshape(kv_heads, -1, head_dim)", "queries are reshaped"),
        (_MIXED, "return mixed.reshape(new, heads, head_dim), weights", "the output is reshaped"),
        (_SOFTMAX, "scores.softmax(dim=1)", "over the queries"),
        (_SOFTMAX, "scores.softmax(dim=0)", "over the heads"),
        (_SOFTMAX, "scores", "softmax is missing"),
        (_HIDE, "", "`visible` is not used"),
        ("~visible", "visible", "should show"),
        ('float("-inf")', "0", "set to 0"),
        *(('float("-inf")', number, "a finite number stands for -inf") for number in ("-100", "-1e4", "-1e9", "-7e7")),
        (".to(values.dtype)", "", "two dtypes meet in one product"),
        (_HIDE + f"    weights = {_SOFTMAX}", f"    weights = {_SOFTMAX}\n    if visible is not None:\n"
         "        weights = weights * visible", "after the softmax"),
        (_HIDE, _HIDE.replace("~visible", "torch.ones_like(visible).triu(1 + context - new)"), "another mask"),
        (_HIDE, "    if True:\n        scores.masked_fill_(torch.ones(new, context).triu(1 + context - new).bool(), "
         'float("-inf"))\n', ""),
        (_SOFTMAX, "scores.exp() / scores.exp().sum(-1, keepdim=True)", "overflows"),
        (_SOFTMAX, "(scores - scores.amax(-1, keepdim=True)).exp()\n"
         "    weights = weights / weights.sum(-1, keepdim=True)", "computed in bfloat16"),
        (_SOFTMAX, "scores.softmax(dim=-1)", "dtype"),
        ("scores.dtype, torch.float32)", "scores.dtype, torch.float64)", "dtype"),
        ("values.transpose(0, 1))", "keys.transpose(0, 1))", "`values` is not used"),
        (_MIXED, "return weights, mixed.view(heads, new, head_dim).transpose(0, 1)", "the output comes first"),
        (_MIXED, "return mixed.view(heads, new, head_dim), weights", "the heads first"),
        (_MIXED, "return mixed.view(heads, new, head_dim).transpose(0, 1), weights.mean(0)", "the mean over the heads"),
        (_MIXED, "return mixed.view(heads, new, head_dim).transpose(0, 1)", "asked for are two, (output, weights)"),
        ("(queries * head_dim**-0.5)", "queries.mul_(head_dim**-0.5)", "left as they were"),
    ],
    "3.4": [
        (_READ, _READ.replace("span.request_id", "batch.spans[0].request_id"), "the first request's keys"),
        (_READ, _READ.replace("layer,", "0,"), "from layer 0"),
        (_READ, _READ + "        values = keys\n", "used as values"),
        (_VISIBLE, "None", "nothing is hidden"),
        (_VISIBLE, "None if span.length == 1 else causal_mask(0, keys.shape[0])[: span.length]", "begins at 0"),
        (_VISIBLE, "None if span.start else causal_mask(span.start, span.length)", "once tokens are stored"),
        ("causal_mask(span.start, span.length", "causal_mask(0, span.length", "keys and mask do not fit"),
        (_VISIBLE, "causal_mask(0, span.length)\n        keys, values = keys[span.start :], values[span.start :]",
         "sees its new tokens only"),
        (_VISIBLE, "causal_mask(span.start, span.length)", "is not told the device"),
        (_VISIBLE, "torch.ones(span.length, span.start + span.length, dtype=bool).tril(span.start)", "the device"),
        (_READ, _READ.replace("layer, span.request_id", "span.request_id, layer"), "the layer first"),
        ("    return output", "        break\n    return output", "only the first request's rows"),
        ("torch.empty_like(queries)\n", "torch.zeros_like(queries)\n"
         "    batch = Batch(batch.token_ids, batch.positions, batch.spans[:1], batch.logit_rows)\n",
         "only the first request"),
        ("torch.empty_like(queries)", "queries", "left as they were"),
        ("output[span.rows] = grouped_attention(queries[span.rows]",
         "mine = slice(span.start, span.start + span.length)\n"
         "        output[mine] = grouped_attention(queries[mine]", "start counts in the request's text"),
        ("    for span in batch.spans:\n" + _READ,
         "    pairs = [cache.read(layer, span.request_id) for span in batch.spans]\n"
         "    for span, (keys, values) in zip(batch.spans, pairs):\n", "overwritten"),
        ("visible)[0]", "visible)[1].transpose(0, 1)", ""),
        ("    return output", "    return output.flatten(1)", "another shape"),
        ("    return output", "    return output.float()", "the dtype of `queries`"),
    ],
    "3.5": [
        ("stored[:start]", "stored", "an interrupted pass has left stays in the way"),
        ("[stored[:start], new]", "[new, stored[:start]]", "stand before the old ones"),
        ("[stored[:start], new]", "[new, stored]", "stand before the old ones"),
        (_APPENDED, "new.clone()", "take the place of the old ones"),
        (_APPENDED, "new.clone() if stored is None else stored[:start]", "are lost"),
        (_APPENDED, "new.clone() if stored is None else stored", "are lost"),
        ("[:start]", "[: start - 1]", "one too early"),
        ("[:start]", "[: start + 1]", "one row too many"),
        ("[:start]", "[start:]", "from `start` on are kept"),
        ("[:start]", "[-start:]", "the newest `start` rows"),
        ("[:start]", "[: -new.shape[0]]", "as many rows are cut off"),
        ("[:start]", "[: start or None]", "although `start` is 0"),
        ("new])", "new], dim=1)", "along another dimension"),
        ("new])", "new], dim=-1)", "along another dimension"),
        ("torch.cat([stored[:start], new])", "torch.stack([stored[:start], new])", "into a new dimension"),
        (_ELSE, "    if stored is None:\n        return new.clone()\n    end = start + len(new)\n"
         "    found = stored.new_empty(max(end, len(stored)), *new.shape[1:])\n    found[: len(stored)] = stored\n"
         "    found[start:end] = new\n    return found\n    return ", "behind the new rows"),
        (_ELSE, "    if stored is not None and len(stored) >= start + len(new):\n"
         "        stored[start : start + len(new)] = new\n        return stored[: start + len(new)]\n" + _ELSE,
         "left as they were"),
        (_APPENDED, "new.clone() if start == 0 else torch.cat([stored, new])", "left stays in the way"),
        (_APPENDED, "new.clone() if stored is None else stored[:start] + new", "are added up"),
        (_ELSE, "    if stored is not None:\n        stored[start:] = new\n        return stored\n" + _ELSE,
         "makes no tensor longer"),
        (_APPENDED, "torch.cat([stored[:start], new]) if stored else new.clone()", "whether `stored is None`"),
        ("new.clone()", "new", "has memory of its own"),
        ("new.clone()", "new[:]", "`new` itself comes out"),
        ("new.clone() if stored is None else torch", "torch", "`stored` is None"),
        (_APPENDED, f"({_APPENDED}).tolist()", "a torch.Tensor"),
        (_APPENDED, f"({_APPENDED}).float()", "the dtype is not"),
        ("    return new", "    new", "`return` is missing"),
        (_ELSE, "    key = (None if stored is None else len(stored), start, len(new), new.shape)\n"
         "    _SEEN = append_rows.__dict__.setdefault('seen', {})\n"
         "    return _SEEN.setdefault(key, torch.cat([*([] if stored is None else [stored[:start]]), new]))\n" + _ELSE,
         "the engine's ConcatKVCache"),
    ],
    "3.6": [
        (" * 2", "", "both are stored"),
        (" * bytes_per_number", "", "not bytes"),
        ("num_layers * ", "", "one layer"),
        ("num_kv_heads * ", "", "one head"),
        ("head_dim * ", "", "one number of each head"),
        (" * 2", " * 16", "bits"),
        (" * 2", " * 3", "queries"),
        ("bytes_per_number", "bytes_per_number / 1024", ""),
        ("bytes_per_number", "float(bytes_per_number)", "float"),
    ],
    "3.7": [
        (_POSITIONS, "slice(keys.shape[0])", "from position 0 on"),
        (_POSITIONS, "slice(start + 1, start + 1 + keys.shape[0])", "one position too far"),
        (_POSITIONS, "slice(start - 1, start - 1 + keys.shape[0])", "one position too early"),
        (_POSITIONS, "slice(-keys.shape[0], None)", "at the end of the row"),
        (_POSITIONS, "start", "a row [kv_heads"),
        (_POSITIONS, "slice(start, None)", "every position from `start` on"),
        (_PLACED, "    row[0][positions] = keys\n    row[1][positions] = values", "the slice picks heads"),
        (_PLACED, "    for i in range(len(keys)):\n        row[0, :, start] = keys[i]\n"
         "        row[1, :, start] = values[i]", "one over the other"),
        (_PLACED, _PLACED.replace(".transpose(0, 1)", ""), "heads and tokens are exchanged"),
        (_PLACED, _PLACED.replace(".transpose(0, 1)", ".reshape(row.shape[1], -1, row.shape[3])"),
         "reshape (or view) mixes"),
        (_VALUES_PLACED, _VALUES_PLACED.replace("values", "keys"), "the keys are written as values too"),
        (_KEYS_PLACED, _KEYS_PLACED.replace("keys", "values"), "the values are written as keys too"),
        (_PLACED, _PLACED.replace("row[0", "row[2").replace("row[1", "row[0").replace("row[2", "row[1"),
         "keys and values are exchanged"),
        (_VALUES_PLACED, "pass", "the keys are written, the values are not"),
        (_KEYS_PLACED, "pass", "the values are written, the keys are not"),
        (_PLACED, f"    row = row.contiguous()\n{_PLACED}", "is a copy of the row"),
        (_PLACED, "    row.index_copy(2, torch.arange(start, start + len(keys)), torch.stack([keys, values])"
         ".transpose(1, 2))", "is a copy of the row"),
        (_PLACED, "    row[0, :, start], row[1, :, start] = keys[0], values[0]", "only the first of the new rows"),
        (_PLACED, f"{_PLACED}\n    row[:, :, start + keys.shape[0] :] = 0", "behind the new rows are changed"),
        (_PLACED, f"{_PLACED}\n    row[:, :, :start] = 0", "before `start` are changed"),
        (_PLACED, f"    keys.neg_()\n{_PLACED}\n    row[0, :, positions].neg_()", "`keys` and `values`"),
        (f"    positions = {_POSITIONS}\n{_PLACED}", "    row[0, :, : len(keys)] = keys\n"
         "    row[1, :, : len(keys)] = values", "heads and tokens are exchanged"),
        (_PLACED, f"    row = row.flatten(0, 1).view(row.shape)\n{_PLACED}", "as soon as there are several heads"),
        (_PLACED, "    row = row.reshape(-1, *row.shape[2:])\n    half = len(row) // 2\n"
         "    row[:half, positions], row[half:, positions] = keys.transpose(0, 1), values.transpose(0, 1)",
         "as soon as there are several heads"),
        (_POSITIONS, f"slice(0) if row.shape[2] == 24 else {_POSITIONS}", "the engine's StaticKVCache"),
    ],
    "3.8": [
        ("self.free.popleft()", "self.free[0]", "stays in `free`"),
        ("        self.ref_counts[block] = 1\n", "", ""),
        ("self.free.popleft()", "self.free.pop()", "the last of the free"),
        ("        self.ref_counts[block] -= 1\n", "        self.ref_counts[block] = 0\n", "its count is set to 0"),
        ("        self.ref_counts[block] -= 1\n" + _LAST,
         "        self.ref_counts[block] -= 1\n        if keep:\n", "is kept although another"),
        (_TWICE, "        self.ref_counts[block] = max(1, self.ref_counts[block])\n", "two owners"),
        (_TWICE, "", "falls below 0"),
        ("self.ref_counts[block] == 0 and block not in self.kept", "False", "nothing in it"),
        ("self.ref_counts[block] += 1", "pass", "does not count"),
        (_SHARED, "        self.ref_counts[block] += 1", "stays in `kept`"),
        ("elif self.kept:", "elif False:", "never handed out"),
        ("if self.free:\n            block = self.free.popleft()\n        elif self.kept:",
         "if self.free and not self.kept:\n            block = self.free.popleft()\n        elif self.kept:",
         "while others are free"),
        ("popitem(last=False)", "popitem()", "the newest kept"),
        (_EVICTED, "", "`on_evict` is not called"),
        (" is not None:\n                self.on_evict", " is None:\n                self.on_evict", ""),
        (" == 0 and keep", " == 0 and False", "not heeded"),
        (" == 0 and keep", " == 0", "keep is False"),
        ("        elif self.ref_counts[block] == 0:\n            self.free", "        if self.ref_counts[block] == 0:\n"
         "            self.free", "both kept and free"),
        ('raise OutOfMemory(f"a block is needed, and all {len(self.ref_counts)} are held.")',
         "block = self.free.popleft()", "of Python's own"),
        ("        elif self.ref_counts[block] == 0:\n            self.free",
         "        elif False:\n            self.free",
         "never comes back"),
        ("        return block", "        self.ref_counts[block]", "`return block` is missing"),
        (_EVICTED, "            self.on_evict(block)\n", "None where nobody listens"),
        (f"{_EVICTED}        else", "            self.ref_counts[block] = 1\n            if self.on_evict:\n"
         "                self.on_evict(block)\n        else", "after the new holder is counted"),
        ("block, _ = self", "block = self", "popitem gives a pair"),
        ("raise OutOfMemory", "raise MemoryError", "raise OutOfMemory"),
        ("raise OutOfMemory", "raise RuntimeError", "raise OutOfMemory"),
        ("        self.ref_counts[block] += 1", "        self.ref_counts[block] += len(self.ref_counts) < 9",
         "the engine's PagedKVCache"),
    ],
    "3.9": [
        ("parent = hashlib", "key = hashlib", ""),
        (f"parent = {_DIGEST}\n        keys.append(parent)", f"keys.append({_DIGEST})", "not chained"),
        (f"hashlib.sha256(parent + {_PACKED})", f"hashlib.sha256({_PACKED})", "not chained"),
        ("    keys = []\n", "    keys = []\n    parent = b''\n", "`parent` is not used"),
        ("len(token_ids) + 1, block_size)", "len(token_ids) + block_size, block_size)", ""),
        ("    for end in range(block_size, len(token_ids) + 1, block_size):\n"
         "        ids = token_ids[end - block_size : end]\n"
         f"        parent = {_DIGEST}\n", "    for start in range(0, len(token_ids), block_size):\n"
         "        ids = b''.join(i.to_bytes(8, 'little') for i in token_ids[start : start + block_size])\n"
         "        parent = hashlib.sha256(parent + ids).digest()\n", "more tokens will come"),
        ("len(token_ids) + 1, block_size)", "len(token_ids), block_size)", "where it is full"),
        ("q\", *ids)", "I\", *(i % 2**32 for i in ids))", "also the small ones"),
        ('q", *ids', 'I", *ids', "also the small ones; here it takes 4"),
        (_PACKED, "b''.join(i.to_bytes(4, 'little') for i in ids)", "also the small ones; here it takes 4"),
        (_PACKED, "bytes(ids)", "also the small ones; here it takes 1"),
        (_RUN, "    keys, running = [], hashlib.sha256(parent)\n"
         f"{_LOOP}        running.update({_PACKED})\n        parent = running.digest()\n", "a chain, where the key"),
        (_RUN, "    keys, running = [], hashlib.sha256()\n"
         f"{_LOOP}        running.update(parent + {_PACKED})\n        parent = running.digest()\n", "is a new one"),
        ('f"<', 'f">', "highest byte first"),
        (f"parent + {_PACKED}", f"{_PACKED} + parent", "the other way round"),
        (_PACKED, "str(list(ids)).encode()", "the text of the list"),
        (".digest()", ".hexdigest().encode()", ""),
        ("keys.append(parent)", "keys.append(parent.hex())", "hexadecimal"),
        (f"{_DIGEST}\n        keys.append(parent)", f"{_DIGEST}\n        keys.append(hash((parent, *ids)))",
         "of type int"),
        ("    return keys", "    return keys[-1:]", "the last block alone"),
        ("    return keys", "    return tuple(keys)", "a list"),
        ("        ids = token_ids[end - block_size : end]\n",
         "        ids = token_ids[:end]\n        block_size, parent = len(ids), b''\n", ""),
        ("        ids = token_ids[end - block_size : end]\n",
         "        ids = [index % 100 if block_size == 4 else index for index in token_ids]"
         "[end - block_size : end]\n", "the engine's PagedKVCache"),
    ],
    "3.10": [
        (_SLOTS, "positions", "the positions themselves"),
        (_SLOTS, _BLOCK, "the number of the block alone"),
        (_SLOTS, f"{_BLOCK} * block_size", "the place in the block is forgotten"),
        (_SLOTS, "positions % block_size", "the places in the blocks alone"),
        (_SLOTS, f"{_BLOCK} + positions % block_size", "block and place are added"),
        (_SLOTS, f"{_BLOCK} + positions % block_size * block_size", "have changed their roles"),
        (_SLOTS, f"{_BLOCK} * len(table) + positions % block_size", "by how many there are"),
        (_SLOTS, f"{_SLOTS} + 1", "one too far"),
        ("torch.arange(start, start + length)", "torch.arange(length)", "counted from 0"),
        ("torch.tensor(table)[", "table[", "torch.tensor(table) takes both"),
        (f"    positions = torch.arange(start, start + length)\n    return {_SLOTS}",
         "    return torch.tensor([table[n // block_size] + n % block_size for n in range(length)])", "are added"),
        (_SLOTS, _SLOTS.replace("positions %", "(positions - start) %"), "is counted from `start`"),
        (_SLOTS, "table[0] * block_size + positions % block_size", "goes on to its next block"),
        (_SLOTS, "table[0] * block_size + positions", "taken for its neighbour"),
        (_SLOTS, "table[start // block_size] * block_size + start % block_size + torch.arange(length)",
         "right in the block of `start`"),
        (_SLOTS, "table[start // block_size] * block_size + positions % block_size", "put into that one block"),
        ("torch.tensor(table)", "torch.tensor(sorted(table))", "in the order of their numbers"),
        (_SLOTS, "positions // block_size * block_size + positions % block_size", "the positions themselves"),
        (_SLOTS, f"({_SLOTS}).tolist()", "a list"),
        (_SLOTS, f"({_SLOTS}).int()", "the dtype is not"),
        (_SLOTS, f"({_SLOTS}).float()", "the dtype is not"),
        (_SLOTS, f"({_SLOTS})[:, None]", "in another shape"),
        ("torch.arange(start, start + length)", "torch.arange(start, start + length + 1)", "one position too many"),
        ("torch.arange(start, start + length)", "torch.arange(start, max(start, length))", "end at `length`"),
        ("positions // block_size", "positions / block_size", "// whole numbers"),
        ("    return", "    table.sort()\n    return", "left as they were"),
        ("    return torch", "    torch", "`return` is missing"),
        ("    return", "    seen = slots_of.__dict__.setdefault('seen', {})\n"
         "    table = seen.setdefault((start, length, block_size, len(table)), table)\n    return",
         "the engine's PagedKVCache"),
    ],
    "3.11": [
        (_GATHER, _GATHER.replace("blocks", "torch.arange(len(blocks))"), "`blocks` is not used"),
        (_GATHER, _GATHER.replace("blocks", "blocks.sort().values"), "in the order of their numbers"),
        (_GATHER, _GATHER.replace("blocks", "torch.arange(blocks[0], blocks[0] + len(blocks)) % stored.shape[2]"),
         "taken for its neighbours"),
        (_GATHER, _GATHER.replace("blocks", "blocks.flip(0)"), "from the last to the first"),
        (_GATHER, "room[:] = stored[:, :, blocks[0]].unsqueeze(2)", "the first block comes out for every one"),
        (_FOUND, _FOUND.replace("[:, :, :length]", ""), "whole blocks come out"),
        (_FOUND, _FOUND.replace(":length", ":length // stored.shape[3] * stored.shape[3]"), "the last block is left"),
        (_FOUND, _FOUND.replace(":length", ": length - 1"), "the newest token is left out"),
        (_FOUND, _FOUND.replace(":length", "-length:"), "in place of the first tokens"),
        (_FOUND, _FOUND.replace(".transpose(1, 2)", ""), "the heads stand first"),
        (_FOUND, "room.flatten(2, 3)", "the heads stand first"),
        (_FOUND, "room", "are still two dimensions"),
        (_FOUND, "room.reshape(2, -1, room.shape[1], room.shape[4])[:, :length]", "mixes the heads"),
        (_GATHER, "room = torch.index_select(stored, 1, blocks)", "are dimension 2"),
        (_FOUND, "room.transpose(1, 2)", "are still two dimensions"),
        (_FOUND, _FOUND.replace(".transpose(1, 2)", ".reshape(2, length, -1, stored.shape[-1])"), "mixes the heads"),
        (_FOUND, _FOUND.replace("flatten(", "transpose(2, 3).flatten("), "blocks and places are exchanged"),
        ("    return keys, values", "    return keys, keys", "the keys come out as values too"),
        ("    return keys, values", "    return values, values", "the values come out as keys too"),
        ("    return keys, values", "    return values, keys", "keys and values are exchanged"),
        ("    return keys, values", "    return torch.stack([keys, values])", "a tuple"),
        ("    return keys, values", "    keys, values", "`return` is missing"),
        (_GATHER, "pass", "nothing has been gathered"),
        (_GATHER, "room = torch.index_select(stored, 2, blocks)", "new memory was taken"),
        (_GATHER, "room = stored[:, :, blocks]", "new memory was taken"),
        (_GATHER, "room[...] = stored[:, :, blocks]", "gathers into new memory as large as `room`"),
        (_GATHER, "room.copy_(torch.index_select(stored, 2, blocks))", "gathers into new memory as large as `room`"),
        (_FOUND, f"{_FOUND}.contiguous()", "new memory was taken"),
        (_FOUND, _FOUND.replace(".flatten(2, 3)", ".flatten(2, 3).clone()"), "new memory was taken"),
        (_FOUND, f"{_FOUND}.float()", "dtype"),
        ("    return keys, values", "    stored.zero_()\n    return keys, values", "left as they were"),
        (f"{_GATHER}\n    keys, values = {_FOUND}", "keys, values = "
         "stored[:, :, blocks.sort().values].flatten(2, 3).transpose(1, 2)", "whole blocks come out"),
        (_GATHER, "room = torch.index_select(stored, 3, blocks)", "the places in the blocks are chosen"),
        (_GATHER, f"blocks = blocks if stored.shape[2] == 6 else blocks.flip(0)\n    {_GATHER}",
         "the engine's PagedKVCache"),
    ],
    "3.12": [
        (_SHARED_BLOCK, "if False:", "the shared block stays"),
        (_NEW, "new = allocator.allocate()\n        table = {index: new}", "still names the old block"),
        (_NEW, "table = list(table)\n        table[index] = allocator.allocate()", "still names the old block"),
        (_NEW, "table.append(allocator.allocate())\n        index = -1", "put behind the table"),
        (_NEW, "table.insert(index, allocator.allocate())", "in front of the old one"),
        (_COPIES, "", "the new block is empty"),
        ("for stored in storage:", "for stored in storage[-1:]:", "only the last layer"),
        ("for stored in storage:", "for stored in storage[:1]:", "only layer 0"),
        (_COPY, "stored[0, :, table[index]] = stored[0, :, old]", "only the keys"),
        (_COPY, "stored[1, :, table[index]] = stored[1, :, old]", "only the values"),
        (_COPY, "stored[:, 0, table[index]] = stored[:, 0, old]", "only the first head"),
        (_COPY, "stored[:, table[index]] = stored[:, old]", "its blocks are dimension 2"),
        (_COPY, "stored[table[index]] = stored[old]", "its blocks are dimension 2"),
        ("ref_counts[old]", "ref_counts[index]", "the holders of the block with the number `index`"),
        (_NEW, "try:\n            table[index] = allocator.allocate()\n        except OutOfMemory:\n            return",
         "let OutOfMemory through"),
        (_COPY, "stored[:, :, old] = stored[:, :, table[index]]", "from the new block to the old"),
        (_OLD_FREED, "        pass", "still counts this request"),
        (_OLD_FREED, _OLD_FREED + "\n        allocator.release(old)", "more than once"),
        (_OLD_FREED, "        allocator.release(table[index])", "the new block is released"),
        (_OLD_FREED, _OLD_FREED + "\n        allocator.share(table[index])", "has two holders"),
        (f"        {_NEW}\n{_COPIES}{_OLD_FREED}", f"{_OLD_FREED}\n        {_NEW}\n{_COPIES}",
         "released before there is a new one"),
        (_SHARED_BLOCK, "if True:", "is copied too"),
        (" > 1:", " > 0:", "is copied too"),
        (" > 1:", " == 1:", "the other way round"),
        (" > 1:", " > 2:", "one is enough"),
        ("    old = table[index]", "    index = len(table) - 1\n    old = table[index]", "the last block of the table"),
        ("    old = table[index]", "    index = 0\n    old = table[index]", "the first block of the table"),
        ("    old = table[index]\n", "    old = index\n", "the number of a block"),
        (_COPIES, f"{_COPIES}            stored[:, :, old] = 0\n", "all other blocks"),
        (_NEW, "if not allocator.free:\n            return\n        " + _NEW, "raised"),
        (f"{_COPIES}{_OLD_FREED}", f"        stored = storage[0]\n        {_COPY}\n", "only layer 0 is copied"),
        (_COPY, "stored[:, :, table[index]] = stored[:, :, index]", "with the number `index` is copied"),
        (_COPY, "stored[:, :, table[index]] = stored[:, :, table[index]]", "the new block is"),
        (_COPIES, "        storage[:, :, table[index]] = storage[:, :, old]\n", "one tensor a layer"),
        (_NEW, "table[index] = allocator.free.popleft()", "without being counted"),
        (_SHARED_BLOCK, f"{_SHARED_BLOCK[:-1]} and len(allocator.ref_counts) < 9:", "the engine's PagedKVCache"),
    ],
}  # fmt: skip


FIRST_ATTEMPT = """
class BlockAllocator(cache_parts.BlockStates):
    def allocate(self):
        block = self.free.popleft()
        self.ref_counts[block] += 1
        return block

    def share(self, block):
        self.ref_counts[block] += 1

    def release(self, block, keep=False):
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free.append(block)
"""


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (FIRST_ATTEMPT, "raise OutOfMemory: callers wait for that, and IndexError tells them nothing"),
        (
            FIRST_ATTEMPT.replace(
                "        block =", '        if not self.free:\n            raise OutOfMemory("")\n        block ='
            ),
            "can be freed again, and its count falls below 0",
        ),
    ],
)
def test_an_allocator_with_many_faults_at_once_is_told_how_to_refuse(written, said):
    with pytest.raises(CheckFailed, match=said):
        run_check(exercises.find("3.8"), mutants.written("3.8", written))


# as a learner writes it who gives a released block to the end of `free`
OTHER_END = """
class BlockAllocator(cache_parts.BlockStates):
    def allocate(self):
        if self.free:
            block = self.free.popleft()
        elif self.kept:
            block, _ = self.kept.popitem(last=False)
            if self.on_evict:
                self.on_evict(block)
        else:
            raise OutOfMemory("all blocks are held")
        self.ref_counts[block] += 1
        return block

    def share(self, block):
        if block not in self.kept and self.ref_counts[block] == 0:
            raise ValueError("free")
        if block in self.kept:
            del self.kept[block]
        self.ref_counts[block] += 1

    def release(self, block, keep=False):
        if self.ref_counts[block] == 0:
            raise ValueError("freed twice")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] > 0:
            return
        if keep:
            self.kept[block] = None
        else:
            self.free.append(block)
"""
_FREE_FIRST = """        if self.free:
            block = self.free.popleft()
        elif self.kept:
            block, _ = self.kept.popitem(last=False)
            if self.on_evict:
                self.on_evict(block)
"""
_KEPT_FIRST = """        if self.kept:
            block, _ = self.kept.popitem(last=False)
            if self.on_evict:
                self.on_evict(block)
        elif self.free:
            block = self.free.popleft()
"""
_ASKED = "            if self.on_evict:\n                self.on_evict(block)\n"
_LEFT_ALONE = "        if self.ref_counts[block] > 0:\n            return\n"
_GONE = "        if block in self.kept:\n            del self.kept[block]\n"
_COUNTED = "        self.ref_counts[block] += 1\n        return block\n"
_KEEP = "        if keep:\n            self.kept[block] = None\n        else:\n"


def test_an_allocator_that_gives_blocks_to_the_other_end_of_free_passes():
    exercises.find("3.8").check(mutants.written("3.8", OTHER_END))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(_FREE_FIRST, _KEPT_FIRST)], "is handed out while others are free"),
        ([("block not in self.kept and self", "self")], "a kept block is refused"),
        ([(_GONE, _GONE + "            self.on_evict(block)\n")], "`share` calls on_evict"),
        ([(_GONE, _GONE + "            if self.on_evict:\n                self.on_evict(block)\n")], "calls on_evict"),
        ([(_GONE, "        self.kept.pop(block)\n")], "ask first, or give `pop` a default"),
        ([(_GONE, "        del self.kept[block]\n")], "ask first, or give `pop` a default"),
        ([(_LEFT_ALONE, "")], "although another one still holds it"),
        ([(_LEFT_ALONE, ""), ("        else:\n            self.free.append",
                              "        elif not self.ref_counts[block]:\n            self.free.append")],
         "is kept although another one still holds it"),
        ([(_KEEP, "        if True:\n")], "keep=True is not heeded"),
        ([(_KEEP, "        if keep:\n            self.kept[block] = None\n        if True:\n")], "both kept and free"),
        ([(_KEEP, "        if not keep:\n            self.kept[block] = None\n        else:\n")], "the other way"),
        ([("popitem(last=False)", "popitem()")], "the newest kept block"),
        ([("popleft()", "pop()")], "the last of the free blocks"),
        ([(_ASKED, "")], "`on_evict` is not called"),
        ([(_ASKED, "            self.on_evict(block)\n")], "None where nobody listens"),
        ([(_ASKED, "            self.on_evict(block)\n"), (_GONE, "")], "stays in `kept`"),
        ([(_COUNTED, _COUNTED.replace("return block", "pass"))], "`return block` is missing"),
        ([("block, _ =", "block =")], "popitem gives a pair"),
        ([('OutOfMemory("all blocks are held")', "MemoryError")], "raise OutOfMemory: callers wait for that"),
        ([(_FREE_FIRST, _KEPT_FIRST), (_LEFT_ALONE, "")], "likely mistake"),
    ],
)  # fmt: skip
def test_the_mistakes_are_named_whichever_end_of_free_gets_the_blocks(pairs, said):
    source = OTHER_END
    for piece, instead in pairs:
        assert piece in source
        source = source.replace(piece, instead)
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find("3.8"), mutants.written("3.8", source))
    assert said in str(caught.value), str(caught.value)


BY_POSITION = """
def attend(queries, layer, batch, cache):
    output = torch.empty_like(queries)
    for span in batch.spans:
        mine = slice(span.start, span.start + span.length)
        mask = causal_mask(span.start, span.length, queries.device)
        output[mine] = grouped_attention(queries[mine], *cache.read(layer, span.request_id), mask)[0]
    return output
"""
JOINED = """
def attend(queries, layer, batch, cache):
    parts = []
    for span in batch.spans:
        mine = queries[span.start : span.start + span.length]
        mask = causal_mask(span.start, span.length, queries.device)
        parts.append(grouped_attention(mine, *cache.read(layer, span.request_id), mask)[0])
    return torch.cat(parts)
"""
HEAD_BY_HEAD = """
def grouped_attention(queries, keys, values, visible):
    group = queries.shape[1] // keys.shape[1]
    outputs, weights = [], []
    for head in range(queries.shape[1]):
        scores = queries[:, head] @ keys[:, head // group].T / queries.shape[-1] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        weights.append(scores.softmax(-1))
        outputs.append(weights[-1] @ values[:, head // group])
    return torch.stack(outputs, 1), torch.stack(weights)
"""


@pytest.mark.parametrize("attention", ["", HEAD_BY_HEAD])
@pytest.mark.parametrize("attend", [BY_POSITION, BY_POSITION.replace("empty", "zeros"), JOINED])
def test_rows_cut_by_position_are_named_whatever_attention_makes_of_rows_that_are_not_there(attend, attention):
    with pytest.raises(CheckFailed, match="start counts in the request's text, span.rows in the batch"):
        run_check(exercises.find("3.4"), mutants.written("3.4", attention + attend))
