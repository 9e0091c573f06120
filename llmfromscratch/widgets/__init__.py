"""Figures that can be explored: each is a pure `draw_*` function, and a form of it with controls for notebooks.

`form.FigureForm` is the shared part; every other module here is one figure.
"""

from __future__ import annotations

try:
    import matplotlib as _matplotlib  # noqa: F401 - asked for here, so that one sentence says what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "The figures are drawn with matplotlib, which is not installed; run: pip install 'llmfromscratch[course]'"
    ) from error

from llmfromscratch.widgets.attention_mask import attention_mask, draw_attention_mask
from llmfromscratch.widgets.attention_pattern import attention_pattern, draw_attention_pattern
from llmfromscratch.widgets.attention_tiles import attention_tiles, draw_attention_tiles
from llmfromscratch.widgets.beam_tree import beam_tree, draw_beam_tree
from llmfromscratch.widgets.checkpoint_map import checkpoint_map, draw_checkpoint_map
from llmfromscratch.widgets.cost_curves import cost_curves, draw_costs
from llmfromscratch.widgets.cost_measurement import measure_costs
from llmfromscratch.widgets.draft_timeline import draft_timeline, draw_draft_timeline
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.frontier import draw_frontier, frontier
from llmfromscratch.widgets.gantt import draw_gantt, gantt
from llmfromscratch.widgets.key_channels import draw_key_channels, key_channels
from llmfromscratch.widgets.latency_distribution import draw_latency_distribution, latency_distribution
from llmfromscratch.widgets.page_grid import draw_page_grid, page_grid
from llmfromscratch.widgets.page_runs import record_allocations, record_pages
from llmfromscratch.widgets.placement_planner import draw_placement, placement_planner
from llmfromscratch.widgets.repetition_curve import draw_repetition, repetition_curve
from llmfromscratch.widgets.roofline import draw_roofline, roofline
from llmfromscratch.widgets.rounding_run import record_tensors
from llmfromscratch.widgets.sampling_distribution import draw_sampling_distribution, sampling_distribution
from llmfromscratch.widgets.sensitivity import draw_sensitivity, sensitivity
from llmfromscratch.widgets.streaming_buffer import draw_streaming_buffer, streaming_buffer
from llmfromscratch.widgets.time_waterfall import draw_time_waterfall, time_waterfall
from llmfromscratch.widgets.token_borders import draw_token_borders, token_borders
from llmfromscratch.widgets.token_reading import byte_tokenizer, character_tokenizer
from llmfromscratch.widgets.tokens_per_character import draw_tokens_per_character, tokens_per_character
from llmfromscratch.widgets.weight_histogram import draw_weight_histogram, weight_histogram
from llmfromscratch.widgets.what_if import draw_what_if, what_if

__all__ = [
    "FigureForm",
    "attention_mask",
    "attention_pattern",
    "attention_tiles",
    "beam_tree",
    "byte_tokenizer",
    "character_tokenizer",
    "checkpoint_map",
    "cost_curves",
    "draft_timeline",
    "draw_attention_mask",
    "draw_attention_pattern",
    "draw_attention_tiles",
    "draw_beam_tree",
    "draw_checkpoint_map",
    "draw_costs",
    "draw_draft_timeline",
    "draw_frontier",
    "draw_gantt",
    "draw_key_channels",
    "draw_latency_distribution",
    "draw_page_grid",
    "draw_placement",
    "draw_repetition",
    "draw_roofline",
    "draw_sampling_distribution",
    "draw_sensitivity",
    "draw_streaming_buffer",
    "draw_time_waterfall",
    "draw_token_borders",
    "draw_tokens_per_character",
    "draw_weight_histogram",
    "draw_what_if",
    "frontier",
    "gantt",
    "key_channels",
    "latency_distribution",
    "measure_costs",
    "page_grid",
    "placement_planner",
    "record_allocations",
    "record_pages",
    "record_tensors",
    "repetition_curve",
    "roofline",
    "sampling_distribution",
    "sensitivity",
    "streaming_buffer",
    "time_waterfall",
    "token_borders",
    "tokens_per_character",
    "weight_histogram",
    "what_if",
]
