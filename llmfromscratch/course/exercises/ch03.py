"""Chapter 3, attention and the KV cache: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import (
    allocator_checks,
    attention_checks,
    cache_checks,
    copy_on_write_checks,
    kv_clinic,
    paging_checks,
    paging_clinic,
    ragged_checks,
)

EXERCISES = [
    Exercise(
        id="3.1",
        object="llmfromscratch.course.sketches.ch03.softmax",
        title="softmax",
        points=1,
        minutes=6,
        check=attention_checks.check_softmax,
        hints=(
            "Three steps: make the scores small enough for e to bear, take the powers, divide them by their sum. Which "
            "of the steps looks at a row as a whole?",
            "amax and sum take dim=-1 for the last dimension; keepdim=True keeps it with size 1, so that what they "
            "give can be subtracted from the rows, or divide them.",
            "torch.exp of the scores less each row's amax, then divided by each row's sum of that. No `-=` and no "
            "`.exp_()`: `scores` belongs to the caller.",
        ),
    ),
    Exercise(
        id="3.2",
        object="llmfromscratch.attention.causal_mask",
        title="who may look at whom",
        points=2,
        minutes=8,
        check=attention_checks.check_causal_mask,
        hints=(
            "Say it for one row: at which position of the text does its token stand, and which keys may it see? Those "
            "before it, and its own too.",
            "Compare two rows of numbers, the positions of the queries and those of the keys, with <= and "
            "broadcasting; or take a matrix of ones and keep a triangle of it (torch.tril).",
            "torch.ones(new, start + new, dtype=torch.bool) and .tril(diagonal=...): with diagonal 0 row 0 sees one "
            "key only; how many does it see when `start` tokens are stored? Mind `device`.",
        ),
    ),
    Exercise(
        id="3.3",
        object="llmfromscratch.attention.grouped_attention",
        title="attention of one request",
        points=4,
        minutes=25,
        check=attention_checks.check_grouped_attention,
        hints=(
            "Write it for one head first: scores [new, context], hidden ones, softmax, and the mixing of the values. "
            "Then ask which dimension has to stand in front so that all heads go at once.",
            "transpose and permute move a dimension, reshape only cuts the numbers anew. For the groups: view the "
            "heads as [kv_heads, group], then all rows of one group meet the same keys in one torch.bmm.",
            "Rows [kv_heads, group * new, head_dim] times keys [kv_heads, head_dim, context], viewed as [heads, new, "
            "context]; masked_fill(~visible, -inf); softmax(dim=-1, dtype=torch.float32) (float64 stays); the same way "
            "back with the values.",
        ),
    ),
    Exercise(
        id="3.4",
        object="llmfromscratch.attention.attend",
        title="prompts and single tokens side by side",
        points=2,
        minutes=10,
        check=ragged_checks.check_attend,
        hints=(
            "A loop over batch.spans. What does one request need: which rows of the queries, which keys, which mask?",
            "queries[span.rows] are the request's queries, cache.read(layer, span.request_id) its keys and values. The "
            "result has a place of its own, made before the loop.",
            "causal_mask(span.start, span.length, queries.device) serves a chunk and a single token; grouped_attention "
            "gives the output first. Write it to output[span.rows] before you read for the next request.",
        ),
    ),
    Exercise(
        id="3.5",
        object="llmfromscratch.kv_cache.append_rows",
        title="remember by concatenation",
        points=2,
        minutes=8,
        check=cache_checks.check_append_rows,
        hints=(
            "Go through the worked example: which of the rows that are stored still count, and where do the new ones "
            "belong? And what is there to cut when nothing is stored yet?",
            "A slice keeps the first rows; torch.cat takes a list of tensors, joins them along dimension 0 unless told "
            "otherwise, and copies them. Where there is nothing to join with, clone makes the copy.",
            "None first: return new.clone(). Otherwise torch.cat of the stored rows up to `start` and the new ones, in "
            "this order.",
        ),
    ),
    Exercise(
        id="3.6",
        object="llmfromscratch.kv_cache.bytes_per_token",
        title="what a token costs",
        points=1,
        minutes=3,
        check=cache_checks.check_bytes_per_token,
        hints=(
            "How many numbers does one layer keep for one token? It keeps two kinds of vectors.",
            "A key/value head keeps head_dim numbers for the key and as many for the value.",
            "Multiply: the layers, 2, the heads, the numbers of a head, the bytes of a number.",
        ),
    ),
    Exercise(
        id="3.7",
        object="llmfromscratch.kv_cache.write_positions",
        title="a place for each request",
        points=2,
        minutes=10,
        check=cache_checks.check_write_positions,
        hints=(
            "`row` has four dimensions. Which index picks keys or values, and which dimension are the positions? One "
            "dimension stands elsewhere than in the rows that come in.",
            "Assigning to a slice, as in row[0, :, a:b] = ..., writes into the cache; row itself must not be replaced. "
            "transpose(0, 1) makes [kv_heads, tokens, head_dim] of [tokens, kv_heads, head_dim].",
            "As many positions as there are tokens (keys.shape[0]), from `start` on. Assign the transposed keys to "
            "row[0] at these positions of every head, and the transposed values to row[1].",
        ),
    ),
    Exercise(
        id="3.8",
        object="llmfromscratch.kv_cache.BlockAllocator",
        title="the block allocator",
        points=4,
        minutes=20,
        check=allocator_checks.check_block_allocator,
        hints=(
            "Draw the three states of a block (free, held, kept) and an arrow for each way from one to another. Every "
            "arrow belongs to one of the three methods.",
            "self.free.popleft() gives the first free block; self.kept.popitem(last=False) the pair of the oldest kept "
            "one. A block that is shared leaves `kept` (pop with a default, for it may not be there).",
            "release: refuse at 0, count down, and only at 0 put the block somewhere. allocate: free, else kept (tell "
            "on_evict, where there is one), else OutOfMemory; then the count is 1.",
        ),
    ),
    Exercise(
        id="3.9",
        object="llmfromscratch.kv_cache.block_keys",
        title="names for shared beginnings",
        points=2,
        minutes=10,
        check=allocator_checks.check_block_keys,
        hints=(
            "A loop over the full blocks; each key goes into the next one. What goes into the first?",
            "hashlib.sha256(data).digest() gives 32 bytes; data is bytes + bytes. A number in 8 bytes: "
            'number.to_bytes(8, "little").',
            "range(0, len(token_ids) - block_size + 1, block_size) are the starts of the full blocks. Keep the newest "
            "key in `parent`, and append it to the list.",
        ),
    ),
    Exercise(
        id="3.10",
        object="llmfromscratch.kv_cache.slots_of",
        title="where a token lies",
        points=2,
        minutes=10,
        check=paging_checks.check_slots_of,
        hints=(
            "Do the worked example for one position with pencil and paper, then for the one after the last of a block. "
            "Which numbers did you need?",
            "A loop over the positions does it. Without one: torch.arange(start, start + length) has all positions, "
            "and // and % work on all of them at once.",
            "A tensor of blocks, torch.tensor(table), can be indexed with a tensor: positions // block_size says which "
            "of its entries. Times block_size, plus the place in the block.",
        ),
    ),
    Exercise(
        id="3.11",
        object="llmfromscratch.kv_cache.read_blocks",
        title="read through the table",
        points=2,
        minutes=12,
        check=paging_checks.check_read_blocks,
        hints=(
            "Two steps: gather the blocks into `room`, then show it in the shape that is asked for. The second moves "
            "no number in memory.",
            "torch.index_select(stored, dimension, blocks, out=room) gathers; which dimension counts the blocks? "
            "flatten(2, 3) makes one row of tokens of blocks and places: [2, kv_heads, n * block_size, head_dim].",
            "Of the flattened room, keep the first `length` tokens ([:, :, :length]) and exchange heads and tokens "
            "(transpose(1, 2)); its first half are the keys, its second the values.",
        ),
    ),
    Exercise(
        id="3.12",
        object="llmfromscratch.kv_cache.make_writable",
        title="copy on write",
        points=3,
        minutes=12,
        check=copy_on_write_checks.check_make_writable,
        hints=(
            "Nothing is to be done for a block that only this table holds. For a shared one the docstring names four "
            "steps; which of them can fail, and so has to come first?",
            "allocator.ref_counts[block] says how many hold it, allocator.allocate() gives a new one that counts you "
            "already. stored[:, :, block] is one block's keys and values in one layer.",
            "Keep the old number in a variable, and go by the order of the docstring: the new block, the copy in every "
            "layer of `storage` (stored[:, :, new] = stored[:, :, old]), the table, allocator.release(old).",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="3.a",
        title="the prompt that nobody read",
        story=kv_clinic.PROMPT_STORY,
        run=kv_clinic.show_prompt,
        broken=kv_clinic.continue_text,
        check=kv_clinic.check_continue_text,
    ),
    BugHunt(
        id="3.b",
        title="good first token, then nonsense",
        story=kv_clinic.POSITION_STORY,
        run=kv_clinic.show_positions,
        broken=kv_clinic.positions_of,
        check=kv_clinic.check_positions_of,
    ),
    BugHunt(
        id="3.c",
        title="right at once, wrong in chunks",
        story=kv_clinic.CHUNK_STORY,
        run=kv_clinic.show_chunks,
        broken=kv_clinic.chunk_attention,
        check=kv_clinic.check_chunk_attention,
    ),
    BugHunt(
        id="3.d",
        title="one block, two owners",
        story=paging_clinic.OWNERS_STORY,
        run=paging_clinic.show_owners,
        broken=paging_clinic.BlockPool,
        check=paging_clinic.check_block_pool,
    ),
    BugHunt(
        id="3.e",
        title="the story that changed",
        story=paging_clinic.FORK_STORY,
        run=paging_clinic.show_fork,
        broken=paging_clinic.SharedPages,
        check=paging_clinic.check_shared_pages,
    ),
    BugHunt(
        id="3.f",
        title="the same prompt twice",
        story=paging_clinic.TWICE_STORY,
        run=paging_clinic.show_twice,
        broken=paging_clinic.tokens_to_take_over,
        check=paging_clinic.check_tokens_to_take_over,
    ),
]
