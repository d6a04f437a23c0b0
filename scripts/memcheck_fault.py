# SPDX-License-Identifier: Apache-2.0
"""A kernel that reads and writes past its tensor, for memcheck.sh."""

import torch
import triton
import triton.language as tl


@triton.jit
def past_the_end(x, count: tl.constexpr):
    offsets = tl.arange(0, count)
    tl.store(x + offsets, tl.load(x + offsets) + 1)


rows = torch.zeros(1 << 20, device="cuda")
past_the_end[(1,)](rows[-64:], count=1024)
torch.cuda.synchronize()
