"""The checks of chapter 6's floor and of its buckets, against counting tensor by tensor and bucket by bucket."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.config import ModelConfig
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare

# ---- 6.1 the floor -----------------------------------------------------------------------------------------------

Sizes = tuple[int, int, int, int, int, int, int]
_SMOLLM2: Sizes = (30, 576, 1536, 9, 3, 64, 49152)


def config_of(sizes: Sizes) -> ModelConfig:
    """A model of these sizes: layers, hidden, intermediate, heads, key/value heads, head dim, vocabulary."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocab = sizes
    return ModelConfig(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, context_length=8192, tie_word_embeddings=True,
    )  # fmt: skip


def _bytes_case(sizes: Sizes, context: int, weight_bytes: float, cache_bytes: float) -> Case:
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocab = sizes
    text = (
        f"{layers} layer{'s' * (layers > 1)}, hidden_size {hidden}, intermediate_size {intermediate}, {heads} query "
        f"and {kv_heads} key heads of {head_dim}, vocab_size {vocab}, context {context}, weight_bytes "
        f"{weight_bytes:g}, cache_bytes {cache_bytes:g}"
    )
    return Case(text, config_of(sizes), context, weight_bytes, cache_bytes)


def bytes_cases() -> list[Case]:
    """What `decode_bytes` is tried on: one part of the sum after the other."""
    return [
        _bytes_case((1, 4, 6, 2, 2, 2, 10), 0, 1, 0),
        _bytes_case((1, 4, 6, 2, 1, 2, 10), 0, 1, 0),
        _bytes_case((2, 4, 6, 2, 1, 2, 10), 0, 1, 0),
        _bytes_case((1, 6, 7, 3, 1, 4, 11), 0, 1, 0),
        _bytes_case((1, 4, 6, 2, 1, 2, 10), 5, 0, 1),
        _bytes_case((3, 10, 14, 4, 2, 6, 13), 7, 0, 2),
        _bytes_case((3, 10, 14, 4, 2, 6, 13), 7, 2, 1),
        _bytes_case((2, 10, 14, 6, 2, 8, 17), 9, 0.625, 1.125),
        _bytes_case(_SMOLLM2, 128, 2, 2),
    ]


def check_decode_bytes(decode_bytes: Callable[..., float]) -> None:
    """Against the shapes of the model's tensors, one after the other, and the numbers a cache stores."""
    compare(
        as_float(decode_bytes),
        tensor_by_tensor,
        bytes_cases(),
        expected="the bytes of all weights that take part in a product, and of all stored keys and values",
        mistakes=combined(_counted, _BYTES_MISTAKES, at_once=2),
        explain=lambda error, case: _of_config(error),
        what="the bytes",
    )


def as_float(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a whole number that it gives as a float: a sum of whole numbers is as good."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        return float(result) if type(result) is int else result

    return run


def tensor_by_tensor(config: ModelConfig, context: int, weight_bytes: float, cache_bytes: float) -> float:
    """The floor from the shapes of the checkpoint's tensors: every matrix but the embedding, whose rows are looked up
    (a tied head is a product all the same)."""
    shapes = learner_engine.reference("loading").expected_shapes(config)
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and name != "embed_tokens.weight"]
    stored = [(config.num_kv_heads, config.head_dim)] * 2 * context * config.num_layers
    return weight_bytes * float(sum(map(math.prod, matrices))) + cache_bytes * float(sum(map(math.prod, stored)))


def _of_config(error: BaseException) -> str:
    if isinstance(error, AttributeError) and "ModelConfig" in str(error):
        return "a config has num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size"
    return ""


_ALL_HEADS = "num_heads in place of num_kv_heads: several query heads share a key and a value, which are there once"
_BYTES_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the head is missing: it is a product too, with vocab_size rows, in every step", {"head": lambda c: 0}),
    ("the embedding is counted besides the head; of the embedding a step reads one row",
     {"head": lambda c: 2 * c.vocab_size * c.hidden_size}),
    ("the head is counted once a layer; there is one", {"head": lambda c: c.num_layers * c.vocab_size * c.hidden_size}),
    ("a feed-forward part has three products, gate, up and down; one is missing",
     {"ffn": lambda c: 2 * c.hidden_size * c.intermediate_size}),
    ("a feed-forward part has three products, gate, up and down; two are missing",
     {"ffn": lambda c: c.hidden_size * c.intermediate_size}),
    ("the feed-forward part is missing: three products a layer", {"ffn": lambda c: 0}),
    ("the feed-forward products have intermediate_size rows or columns, not 4 * hidden_size",
     {"ffn": lambda c: 12 * c.hidden_size**2}),
    (f"{_ALL_HEADS}. This holds for the products", {"keys": lambda c: c.num_heads}),
    (f"{_ALL_HEADS}. This holds for the cache", {"kv": lambda c: c.num_heads}),
    ("hidden_size stands where num_heads * head_dim belongs: the two need not be equal",
     {"queries": lambda c: c.hidden_size / c.head_dim}),
    ("head_dim is taken for hidden_size / num_heads; a config has a head_dim of its own",
     {"dim": lambda c: c.hidden_size / c.num_heads, "kv_dim": lambda c: c.hidden_size / c.num_heads}),
    ("head_dim is taken for hidden_size / num_heads; a config has a head_dim of its own",
     {"dim": lambda c: c.hidden_size // c.num_heads, "kv_dim": lambda c: c.hidden_size // c.num_heads}),
    ("head_dim is taken for hidden_size / num_heads in the products; a config has a head_dim of its own",
     {"dim": lambda c: c.hidden_size / c.num_heads}),
    ("head_dim is taken for hidden_size / num_heads in the products; a config has a head_dim of its own",
     {"dim": lambda c: c.hidden_size // c.num_heads}),
    ("head_dim is missing in the products: num_heads counts heads, and each has head_dim rows", {"dim": lambda c: 1}),
    ("head_dim is missing in the cache: a stored key has num_kv_heads * head_dim numbers", {"kv_dim": lambda c: 1}),
    ("a head has head_dim rows, not hidden_size", {"dim": lambda c: c.hidden_size}),
    ("a stored key has num_kv_heads * head_dim numbers, not hidden_size",
     {"kv": lambda c: 1, "kv_dim": lambda c: c.hidden_size}),
    ("the output product is missing: attention has four, of queries, keys, values and output",
     {"outputs": lambda c: 0}),
    ("the values' product is missing: attention has four, of queries, keys, values and output",
     {"values": lambda c: 0}),
    ("the products of keys and values are missing: attention has four, of queries, keys, values and output",
     {"values": lambda c: 0, "keys": lambda c: 0}),
    ("keys without values (or the other way round): a token stores one of each in every layer", {"pair": 1}),
    ("the stored keys and values of one layer are counted; every layer has its own", {"stored": lambda c: 1}),
    ("stored keys and values are not counted: with a long context they weigh as much as the weights",
     {"pair": 0}),
    ("the context does not count: each token has a key and a value of its own", {"length": lambda n: 1}),
    ("one token too few is read: `context` has the newest in it", {"length": lambda n: n - 1}),
    ("one token too many is read: `context` has the newest in it", {"length": lambda n: n + 1}),
    ("one layer is counted; there are num_layers", {"layers": lambda c: 1}),
    ("the layers are counted once too often", {"layers": lambda c: c.num_layers + 1}),
    ("weight_bytes and cache_bytes are exchanged", {"sizes": lambda w, c: (c, w)}),
    ("cache_bytes is taken for the weights as well", {"sizes": lambda w, c: (c, c)}),
    ("weight_bytes is taken for the cache as well", {"sizes": lambda w, c: (w, w)}),
    ("these are numbers, not bytes: each of them takes weight_bytes or cache_bytes", {"sizes": lambda w, c: (1, 1)}),
    ("every number is counted as 2 bytes; how many there are is said by weight_bytes and cache_bytes",
     {"sizes": lambda w, c: (2, 2)}),
    ("the bytes are cut to a whole number; those of a weight may be a fraction", {"whole": True}),
]  # fmt: skip


def _counted(
    head: Callable[..., float] = lambda c: c.vocab_size * c.hidden_size,
    ffn: Callable[..., float] = lambda c: 3 * c.hidden_size * c.intermediate_size,
    queries: Callable[..., float] = lambda c: c.num_heads,
    outputs: Callable[..., float] | None = None,
    keys: Callable[..., float] = lambda c: c.num_kv_heads,
    values: Callable[..., float] | None = None,
    kv: Callable[..., float] = lambda c: c.num_kv_heads,
    dim: Callable[..., float] = lambda c: c.head_dim,
    kv_dim: Callable[..., float] = lambda c: c.head_dim,
    pair: int = 2,
    stored: Callable[..., float] = lambda c: c.num_layers,
    length: Callable[[int], int] = lambda n: n,
    layers: Callable[..., float] = lambda c: c.num_layers,
    sizes: Callable[[float, float], tuple[float, float]] = lambda w, c: (w, c),
    whole: bool = False,
) -> Callable[..., float]:
    """The count, part by part, with mistakes switched on."""

    def run(config: ModelConfig, context: int, weight_bytes: float, cache_bytes: float) -> float:
        outward = (outputs or queries)(config)
        heads = queries(config) + outward + keys(config) + (values or keys)(config)
        layer = config.hidden_size * dim(config) * heads + ffn(config)
        cached = stored(config) * length(context) * pair * kv(config) * kv_dim(config)
        a_weight, a_number = sizes(weight_bytes, cache_bytes)
        if whole:
            a_weight, a_number = int(a_weight), int(a_number)
        return float((layers(config) * layer + head(config)) * a_weight + cached * a_number)

    return run


# ---- 6.6 buckets -------------------------------------------------------------------------------------------------


def bucket_cases() -> list[Case]:
    """What `bucket_of` is tried on: around every power of two, and where logarithms round."""
    few = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (9, 1), (1, 64), (64, 64), (65, 64), (100, 64), (129, 64)]
    few += [(10, 3), (12, 3), (13, 3), (24, 3), (300, 48), (0, 1), (0, 16)]
    return [Case("count 7, smallest not given", 7), *(_bucket_case(count, smallest) for count, smallest in few)]


def large_cases() -> list[Case]:
    """Counts at which logarithms round; apart from the others, because adding up to them would take forever."""
    return [_bucket_case(2**power + more, 1) for power in (29, 31, 47, 50) for more in (0, 1)]


def _bucket_case(count: int, smallest: int) -> Case:
    return Case(f"count {count}, smallest {smallest}", count, smallest)


def check_bucket_of(bucket_of: Callable[..., int]) -> None:
    """Against going through the buckets, in whole numbers."""
    for cases in (bucket_cases(), large_cases()):
        compare(
            bucket_of,
            first_that_holds,
            cases,
            expected="the smallest of smallest, 2 * smallest, 4 * smallest, ... that is not below count",
            mistakes=_BUCKET_MISTAKES,
            what="the bucket",
        )


def first_that_holds(count: int, smallest: int = 1) -> int:
    """The first of all buckets, in order."""
    return next(smallest << power for power in range(100) if smallest << power >= count)


def _rounded_log(count: int, smallest: int, log: Callable[[float], float]) -> int:
    return smallest * 2 ** max(math.ceil(log(count / smallest)), 0) if count > 0 else smallest


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


_LOGARITHM = "a logarithm is rounded: it may come out just above a whole number, or lose the one that count has " \
    "more than a power of two; doubling whole numbers is exact"  # fmt: skip
_TOO_LARGE = "a bucket that is just as large as count holds it; the next one is taken"
_BUCKET_MISTAKES: list[tuple[str, Callable[..., Any]]] = [
    ("`smallest` is not used: the buckets are smallest, 2 * smallest, 4 * smallest, ...",
     lambda count, smallest=1: _power_of_two(count)),
    ("these are powers of two, the smallest of them raised; the buckets are smallest times a power of two",
     lambda count, smallest=1: max(_power_of_two(count), smallest)),
    ("the buckets are multiples of smallest; each should be twice the one before, so that there are few",
     lambda count, smallest=1: max(-(-count // smallest), 1) * smallest),
    ("the buckets are multiples of smallest; each should be twice the one before, so that there are few",
     lambda count, smallest=1: -(-count // smallest) * smallest),
    (_TOO_LARGE, lambda count, smallest=1: first_that_holds(count + 1, smallest)),
    ("the bucket is smaller than count: it has to hold it",
     lambda count, smallest=1: max(first_that_holds(count + 1, smallest) // 2, smallest)),
    ("the bucket is smaller than count: it has to hold it",
     lambda count, smallest=1: first_that_holds(count + 1, smallest) // 2),
    ("the bucket is smaller than count: it has to hold it",
     lambda count, smallest=1: max(first_that_holds(count, smallest) // 2, smallest)),
    ("the bucket is smaller than count: it has to hold it",
     lambda count, smallest=1: smallest * 2 ** round(math.log2(max(count, smallest) / smallest))),
    ("count itself comes back where it is above smallest; then there is a graph for every count",
     lambda count, smallest=1: max(count, smallest)),
    ("the bucket is doubled once at most", lambda count, smallest=1: smallest if count <= smallest else 2 * smallest),
    ("only the buckets from 2 * smallest on are tried; the smallest is one too",
     lambda count, smallest=1: max(first_that_holds(count, smallest), 2 * smallest)),
    ("the bucket is squared in place of doubled", lambda count, smallest=1: _squared(count, smallest)),
    ("a count of 0 is held by the smallest bucket",
     lambda count, smallest=1: first_that_holds(count, smallest) if count else 2 * smallest),
    ("a count of 0 is held by the smallest bucket",
     lambda count, smallest=1: first_that_holds(count, smallest) if count else 0),
    (_LOGARITHM, lambda count, smallest=1: _rounded_log(count, smallest, math.log2)),
    (_LOGARITHM, lambda count, smallest=1: _rounded_log(count, smallest, lambda x: math.log(x, 2))),
    (_LOGARITHM, lambda count, smallest=1: _rounded_log(count, smallest, lambda x: math.log(x) / math.log(2))),
]  # fmt: skip


def _squared(count: int, smallest: int) -> int:
    bucket = smallest
    while bucket < count and bucket > 1:
        bucket *= bucket
    return bucket
