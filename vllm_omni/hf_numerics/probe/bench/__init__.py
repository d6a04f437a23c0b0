# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics bench``: what the mode costs, op by op and as a whole engine."""
