"""Chapter 3's sketch against torch's own softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch.course.sketches import ch03


@settings(deadline=None)  # the first call waits for torch
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9), st.sampled_from([torch.float32, torch.float64])
)
def test_the_written_out_softmax_equals_torchs(scores, dtype):
    row = torch.tensor([scores, scores[::-1]], dtype=dtype)
    found = ch03.softmax(row)
    assert found.dtype == dtype
    torch.testing.assert_close(found, row.softmax(dim=-1))


@pytest.mark.parametrize("scores", [[1000.0, 1000.0, -torch.inf], [-2000.0, -2000.0, -torch.inf]])
def test_large_scores_do_not_overflow_and_masked_ones_weigh_nothing(scores):
    assert ch03.softmax(torch.tensor(scores)).tolist() == [0.5, 0.5, 0.0]
